"""The hosts of all ranks, and TCP connections between rank 0 and every other rank, made when an engine starts.

Rank 0 listens only while the connections are made. It broadcasts its addresses and a secret, and each side of a
connection proves to the other that it knows the secret, without sending it:

    rank 0 → rank r   a challenge
    rank r → rank 0   a challenge, r, and the code (HMAC-SHA256) of both challenges and r
    rank 0 → rank r   the code of both challenges
    rank r → rank 0   one byte: r has accepted the connection

So a connection from another program is closed or left waiting, and a rank that finds another program at an address
tries the next address. Later messages are neither encrypted nor signed. Addresses are IPv4. Runs on the thread
that loads the model.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import psutil

from inflight.errors import ConfigError
from inflight.ranks.topology import Host, this_host

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiWorld

_LOOPBACK = "127.0.0.1"
_RENDEZVOUS_S = 60.0
# Timeouts per address; rank 0 listens already, so the first is usually enough.
_TRY_S = (1.0, 3.0, 9.0)
_SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
_CODE_BYTES = 32
_RANK_BYTES = 4
_REPLY_BYTES = _CHALLENGE_BYTES + _RANK_BYTES + _CODE_BYTES
_ACCEPTED = b"\x01"


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a connection.

    Attributes:
        rank: The peer's rank.
        host: The peer's host.
        connection: A connected, blocking socket with TCP_NODELAY.
        leader_address: Rank 0's address on this connection, numeric; equal on both sides unless it is translated
            on the way.
    """

    rank: int
    host: Host
    connection: socket.socket
    leader_address: str


class _Invitation(msgspec.Struct, frozen=True):
    """The addresses and the port at which rank 0 listens, and the secret that proves a rank; broadcast by rank
    0."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes


class _Stranger(Exception):
    """The other side of a connection does not know the secret."""


def gather_hosts(world: MpiWorld) -> list[Host]:
    """Return the hosts of all ranks, by rank. Every rank calls it at the same time."""
    gathered = world.all_gather(msgspec.msgpack.encode(this_host()))
    return [msgspec.msgpack.decode(host, type=Host) for host in gathered]


def meet(world: MpiWorld, hosts: Sequence[Host], timeout_s: float = _RENDEZVOUS_S) -> tuple[Peer, ...]:
    """Connect rank 0 with every other rank. Every rank calls it at the same time.

    Args:
        world: The world of all ranks.
        hosts: The hosts, by rank.
        timeout_s: How long rank 0 waits for the others, in seconds.

    Returns:
        On rank 0, all other ranks, in order; on the other ranks, only rank 0.

    Raises:
        ConfigError: A rank could not be reached.
    """
    if world.rank == 0:
        return tuple(_accept_ranks(world, hosts, timeout_s))
    invitation = msgspec.msgpack.decode(world.broadcast(), type=_Invitation)
    return (_connect_to_leader(world.rank, hosts, invitation),)


# ---------------------------------------------------------------------- rank 0


def _accept_ranks(world: MpiWorld, hosts: Sequence[Host], timeout_s: float) -> list[Peer]:
    is_local = all(host.shares_network_with(hosts[0]) for host in hosts)
    with socket.create_server((_LOOPBACK if is_local else "", 0), backlog=world.size + 16) as listening:
        secret = secrets.token_bytes(_SECRET_BYTES)
        addresses = () if is_local else (*own_addresses(), hosts[0].name)
        world.broadcast(msgspec.msgpack.encode(_Invitation(addresses, listening.getsockname()[1], secret)))
        missing = set(range(1, world.size))
        peers: list[Peer] = []
        for candidate in _authenticated(listening, secret, missing, timeout_s):
            missing.discard(candidate.rank)
            peers.append(
                _peer(candidate.rank, hosts, candidate.connection, candidate.connection.getsockname()[0])
            )
    if missing:
        for peer in peers:
            peer.connection.close()
        who = ", ".join(f"{rank} ({hosts[rank].name}, pid {hosts[rank].pid})" for rank in sorted(missing))
        raise ConfigError(
            f"these ranks did not connect to rank 0 ({hosts[0].name}) within {timeout_s:g} s: {who}"
        )
    return sorted(peers, key=lambda peer: peer.rank)


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this network namespace's interfaces, except the loopback interface."""
    found = [address for interface in psutil.net_if_addrs().values() for address in interface]
    return [
        one.address for one in found if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]


class _Candidate:
    """A connection to rank 0, of another rank or of another program."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = 0  # until the other side has proved its rank
        self._secret = secret
        self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._received = bytearray()
        connection.send(self._challenge)  # fits into the buffer of a new connection

    def read(self, wanted: set[int]) -> bool:
        """Read what has arrived; return whether this is a `wanted` rank that has accepted the connection.

        Raises OSError or _Stranger if this connection cannot become a rank's any more.
        """
        missing = _REPLY_BYTES + len(_ACCEPTED) - len(self._received)
        part = self.connection.recv(missing)
        if not part:
            raise _Stranger
        self._received += part
        if not self.rank and len(self._received) >= _REPLY_BYTES:
            self._reply(wanted)
        if len(self._received) < _REPLY_BYTES + len(_ACCEPTED):
            return False
        if self.rank not in wanted:  # the rank has connected twice
            raise _Stranger
        return True

    def _reply(self, wanted: set[int]) -> None:
        theirs = bytes(self._received[:_CHALLENGE_BYTES])
        rank = int.from_bytes(self._received[_CHALLENGE_BYTES : _CHALLENGE_BYTES + _RANK_BYTES], "big")
        code = bytes(self._received[_CHALLENGE_BYTES + _RANK_BYTES : _REPLY_BYTES])
        if not hmac.compare_digest(code, _code_of_rank(self._secret, self._challenge, theirs, rank)):
            raise _Stranger
        if rank not in wanted:
            raise _Stranger
        self.rank = rank
        self.connection.send(_code_of_leader(self._secret, self._challenge, theirs))


def _authenticated(
    listening: socket.socket, secret: bytes, wanted: set[int], timeout_s: float
) -> Iterator[_Candidate]:
    """Yield connections of ranks that have proved themselves, until the caller has emptied `wanted` or the time
    is up."""
    deadline = time.monotonic() + timeout_s
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while wanted and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                try:
                    if key.data is None:
                        candidate = _Candidate(listening.accept()[0], secret)
                        selector.register(candidate.connection, selectors.EVENT_READ, candidate)
                    elif key.data.read(wanted):
                        selector.unregister(key.data.connection)
                        yield key.data
                except (OSError, _Stranger):
                    _reject(selector, key.data)
        for key in list(selector.get_map().values()):
            _reject(selector, key.data)


def _reject(selector: selectors.BaseSelector, candidate: _Candidate | None) -> None:
    if candidate is not None:  # otherwise the connection ended before it was accepted
        selector.unregister(candidate.connection)
        candidate.connection.close()


# ---------------------------------------------------------------------- the others


def _connect_to_leader(rank: int, hosts: Sequence[Host], invitation: _Invitation) -> Peer:
    is_near = hosts[rank].shares_network_with(hosts[0])
    addresses = (_LOOPBACK,) if is_near else invitation.addresses
    reasons: dict[str, str] = {}
    for try_s in _TRY_S:
        for address in addresses:
            try:
                return _peer(0, hosts, *_try_address(rank, address, invitation, try_s))
            except _Stranger:
                reasons[address] = "another program answers"
            except OSError as error:
                reasons[address] = error.strerror or str(error)
    tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    raise ConfigError(
        f"rank {rank} ({hosts[rank].name}) does not reach rank 0 ({hosts[0].name}) at TCP port "
        f"{invitation.port} ({tried}): every rank needs a connection to rank 0"
    )


def _try_address(
    rank: int, address: str, invitation: _Invitation, timeout_s: float
) -> tuple[socket.socket, str]:
    connection = socket.create_connection((address, invitation.port), timeout=timeout_s)
    try:
        numeric = connection.getpeername()[0]
        theirs = _receive_exactly(connection, _CHALLENGE_BYTES)
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        code = _code_of_rank(invitation.secret, theirs, mine, rank)
        connection.sendall(mine + rank.to_bytes(_RANK_BYTES, "big") + code)
        expected = _code_of_leader(invitation.secret, theirs, mine)
        if not hmac.compare_digest(_receive_exactly(connection, _CODE_BYTES), expected):
            raise _Stranger
        connection.sendall(_ACCEPTED)
    except BaseException:  # otherwise the connection would never be closed
        connection.close()
        raise
    return connection, numeric


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise _Stranger
        received += part
    return received


# ---------------------------------------------------------------------- both


def _peer(rank: int, hosts: Sequence[Host], connection: socket.socket, leader_address: str) -> Peer:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(rank, hosts[rank], connection, leader_address)


def _code_of_rank(secret: bytes, leaders: bytes, ranks: bytes, rank: int) -> bytes:
    # The codes contain the roles, so that an answer to one challenge cannot be used for another.
    return hmac.digest(secret, b"rank" + leaders + ranks + rank.to_bytes(_RANK_BYTES, "big"), "sha256")


def _code_of_leader(secret: bytes, leaders: bytes, ranks: bytes) -> bytes:
    return hmac.digest(secret, b"leader" + leaders + ranks, "sha256")
