"""Choose the ports of a server, or check that they are free, and keep them from others before it listens."""

import contextlib
import errno
import random
import socket
from collections.abc import Generator
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
    if not host:
        raise OptionError("--host got '', expected an address or a name of this machine, such as 0.0.0.0")
    name, colon, port = host.partition(":")
    if "/" in host or (colon and port.isdecimal() and name):
        raise OptionError(
            f"--host {host}: expected an address or a name alone, such as 0.0.0.0; --port and --http-port choose "
            "ports"
        )
    if colon:
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
    with reserve_ports(address, asked) as ports:
        return ports


@contextlib.contextmanager
def reserve_ports(address: str, asked: Ports) -> Generator[Ports]:
    """Yield the ports with every 0 replaced by a free port, and keep others from choosing them meanwhile.

    Each port has a socket that is bound to it but does not listen. With SO_REUSEADDR on both sockets, Linux lets
    a server bind to the port and listen; no socket is given the port as a free one.

    Raises OptionError with the flag of each port that is taken.
    """
    _check_different(asked)
    taken: dict[str, dict[str, int]] = {}  # for each reason, the ports by their flags
    with contextlib.ExitStack() as held:

        def claim(port: int, flag: str) -> int:
            try:
                return _claim(held, address, port)
            except OSError as error:
                taken.setdefault(error.strerror or str(error), {})[flag] = port
                return port

        ports = Ports(
            http=claim(asked.http, "--http-port"),
            grpc=claim(asked.grpc, "--grpc-port"),
            metrics=claim(asked.metrics, "--metrics-port"),
            openai=None if asked.openai is None else claim(asked.openai, "--port"),
        )
        if taken:
            raise OptionError("; ".join(_describe_taken(address, *each) for each in taken.items()))
        yield ports


def _describe_taken(address: str, reason: str, ports: dict[str, int]) -> str:
    if len(ports) == 1:
        ((flag, port),) = ports.items()
        named, advice = f"port {port}", f"another with {flag}"
    else:
        named = "ports " + ", ".join(f"{port} ({flag})" for flag, port in ports.items())
        advice = "others"
    return f"{named} on {address} cannot be used ({reason}): choose {advice}, 0 for any free one"


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


def _claim(held: contextlib.ExitStack, address: str, port: int) -> int:
    """Bind a socket to a port, or to a free one for 0, and return the port.

    Raises OSError if the port is taken, OptionError if the machine does not have the address.
    """
    claimed = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        if port:
            # A port counts as free even if connections of an earlier server are still in TIME_WAIT.
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            claimed.bind((address, port))
        else:
            _bind_to_free(claimed, address)
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the server's own socket
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OptionError(
                f"--host {address}: this machine has no such address; 0.0.0.0 listens on all that it has"
            ) from None
        raise
    return int(claimed.getsockname()[1])


def _bind_to_free(claimed: socket.socket, address: str) -> None:
    """Bind to a free port below the ephemeral ports, which programs that reserve nothing choose from."""
    ports = range(_LOWEST_FREE, _first_of_systems())
    for port in random.sample(ports, min(_TRIES, len(ports))):
        with contextlib.suppress(OSError):
            claimed.bind((address, port))
            return
    claimed.bind((address, 0))


def _first_of_systems() -> int:
    """Return the lowest ephemeral port: the lowest port that the kernel may choose for a connection or port 0."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _LOWEST_FREE
