"""Batches: files of requests, one a line, which are answered at the lowest priority beside all other requests.

`lines` has the format of the files, and `sending` the order of work. Both are used by `inflight batch` (`command`,
`offline`), which sends a file to a server, and by /v1/files and /v1/batches (`routes`, `jobs`, `folder`), which
answer one in the process of /v1.
"""

CONCURRENCY = 16
"""Default number of requests in flight: a quarter of the server's 64 slots, so that others need not wait."""
RETRIES = 10
"""Default number of further attempts after a failure that may be temporary."""
