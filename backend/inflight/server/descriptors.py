"""How many files and connections each process of the server may have open, and what to say where they run out.

A connection of a client is a file descriptor, so the limit is one on clients. Sessions of a shell or of systemd
often have a soft limit of 1024 or fewer, which any process may raise to the hard one.
"""

import resource

TOO_MANY = "Too many open files"
"""How every process says that it has as many as it may."""

_MOST = 65_536  # some programs, mpirun among them, go through all numbers there may be


def raise_limit() -> None:
    """Raise the limit of this process, and of those it starts from now on, as far as that makes sense."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def explanation() -> str:
    """What it means, in words for whoever runs the server."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a process of the server has {limit} files and connections open and may not have more: raise `ulimit -n` "
        "(LimitNOFILE of systemd, --ulimit nofile of a container)"
    )
