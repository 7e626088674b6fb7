"""The limit of open files and connections of each process of the server, and the advice when it is reached.

Each client connection is a file descriptor, so the limit bounds the number of clients. Sessions of a shell or
of systemd often have a soft limit of 1024 or fewer, which `scripts/serve` raises to the hard limit.
"""

import resource

TOO_MANY = "Too many open files"
"""Text in a process's error when it has reached the limit."""


def explanation() -> str:
    """Return advice for the server's operator after a process has run out of file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a process of the server has {limit} files and connections open and may not have more: raise `ulimit -n` "
        "(LimitNOFILE of systemd, --ulimit nofile of a container)"
    )
