"""Batches: files of requests, one a line, which are answered at the lowest priority beside all other requests.

`lines` has the format of the files, and `sending` the order of work. Both are used by `inflight batch` (`command`,
`offline`), which sends a file to a server, and by /v1/files and /v1/batches (`routes`, `jobs`, `folder`), which
answer one in the process of /v1.
"""
