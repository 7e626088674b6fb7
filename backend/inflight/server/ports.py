"""Choose the ports of a server, or check that they are free, before anything is started."""

import contextlib
import errno
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from inflight.server.errors import OptionError

_LOWEST_FREE = 15_000
_TRIES = 100


@dataclass(frozen=True)
class Ports:
    """Port numbers; 0 means any free port. If `openai` is None, there is no OpenAI endpoint."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    openai: int | None = None

    def of_triton(self) -> dict[str, int]:
        """Return the ports that tritonserver listens on, by tritonserver's names of the ports."""
        return {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}


def resolve_host(host: str) -> str:
    """Return the IPv4 address to listen on; raises OptionError if the host has none."""
    if ":" in host:
        raise OptionError(
            f"--host {host}: tritonserver listens on IPv4 alone; python -m inflight.openai takes IPv6 addresses"
        )
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"--host {host}: {reason}: expected an address or a name of this machine; 0.0.0.0 listens on all "
            "addresses"
        ) from None


def resolve_ports(address: str, asked: Ports) -> Ports:
    """Return the ports with every 0 replaced by a free port.

    Raises OptionError with the flag if a port is taken.
    """
    _check_different(asked)
    with contextlib.ExitStack() as held:
        # All ports are held at the same time, so that no free port is chosen twice.
        return Ports(
            http=_claim(held, address, asked.http, "--http-port"),
            grpc=_claim(held, address, asked.grpc, "--grpc-port"),
            metrics=_claim(held, address, asked.metrics, "--metrics-port"),
            openai=None if asked.openai is None else _claim(held, address, asked.openai, "--port"),
        )


def _check_different(asked: Ports) -> None:
    """Raise OptionError if two flags have the same port."""
    flags: dict[int, str] = {}
    given = {
        "--http-port": asked.http,
        "--grpc-port": asked.grpc,
        "--metrics-port": asked.metrics,
        "--port": asked.openai,
    }
    for flag, port in given.items():
        if not port:
            continue
        if port in flags:
            raise OptionError(f"{flags[port]} and {flag} are both {port}: choose different ports")
        flags[port] = flag


def _claim(held: contextlib.ExitStack, address: str, port: int, flag: str) -> int:
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    if port:
        # A port counts as free even if connections of an earlier server are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if port:
            listener.bind((address, port))
        else:
            _bind_to_free(listener, address)
        listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OptionError(
                f"--host {address}: this machine has no such address; 0.0.0.0 listens on all that it has"
            ) from None
        reason = error.strerror or str(error)
        raise OptionError(
            f"port {port} on {address} cannot be used ({reason}): choose another with {flag}, 0 for any free one"
        ) from None
    return int(listener.getsockname()[1])


def _bind_to_free(listener: socket.socket, address: str) -> None:
    """Bind to a free port below the ephemeral ports.

    The server binds to the port only after loading its models, and until then another connection could get
    an ephemeral port.
    """
    ports = range(_LOWEST_FREE, _first_of_systems())
    for port in random.sample(ports, min(_TRIES, len(ports))):
        with contextlib.suppress(OSError):
            listener.bind((address, port))
            return
    listener.bind((address, 0))


def _first_of_systems() -> int:
    """Return the lowest ephemeral port: the lowest port that the kernel may choose for a connection or port 0."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _LOWEST_FREE
