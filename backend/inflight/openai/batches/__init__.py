"""Batches: files of requests, one a line, which are answered at the lowest priority beside all other requests.

`lines` has the format of both files and `sending` the order of work, for `inflight batch` (`command`).
"""
