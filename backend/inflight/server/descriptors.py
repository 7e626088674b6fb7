"""The limit of file descriptors of the server's processes, and advice for the case that it is reached.

Each client connection is a file descriptor, so the limit bounds the number of clients. In shells and systemd
services the soft limit is often 1024 or less; `scripts/serve` raises it to the hard limit.
"""

import resource

TOO_MANY = "Too many open files"
"""Text in the error message of a process that has reached the limit."""


def explanation() -> str:
    """Return advice for the server's operator after a process has run out of file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a process of the server has {limit} files and connections open and may not have more: raise `ulimit -n` "
        "(LimitNOFILE of systemd, --ulimit nofile of a container)"
    )
