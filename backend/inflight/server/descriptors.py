"""How many files and connections each process of the server may have open, and what to say where they run out.

A connection of a client is a file descriptor, so the limit is one on clients. Sessions of a shell or of systemd
often have a soft limit of 1024 or fewer, which `scripts/serve` raises to the hard one.
"""

import resource

TOO_MANY = "Too many open files"
"""How every process says that it has as many as it may."""


def explanation() -> str:
    """Advice for the server's operator when it has run out of file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a process of the server has {limit} files and connections open and may not have more: raise `ulimit -n` "
        "(LimitNOFILE of systemd, --ulimit nofile of a container)"
    )
