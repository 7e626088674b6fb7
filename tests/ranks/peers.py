"""Hosts, Peers and raw heartbeat messages for tests of connections between ranks."""

from __future__ import annotations

import socket
import struct

from inflight.ranks.rendezvous import Peer
from inflight.ranks.topology import Host

BEAT, WAKE, FAILED, GOODBYE, LOADED = range(1, 6)


def make_host(
    pid: int = 1,
    name: str = "ant",
    network: int = 5,
    cores: tuple[int, ...] = (0, 1),
    quota: float | None = None,
) -> Host:
    return Host(name, f"boot of {name}", network, pid, cores, quota)


def make_peer(rank: int, connection: socket.socket, pid: int | None = None) -> Peer:
    return Peer(rank, make_host(100 + rank if pid is None else pid), connection, "127.0.0.1")


def message(kind: int, number: int = 0) -> bytes:
    return struct.pack("!BQ", kind, number)


def read_messages(connection: socket.socket) -> list[tuple[int, int]]:
    """Read all (kind, number) messages until the connection ends."""
    connection.settimeout(30)
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return list(struct.iter_unpack("!BQ", received))
