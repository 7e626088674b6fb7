"""Rendezvous of rank 0 and the others, and refusal of strangers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest

from inflight.errors import ConfigError
from inflight.processors import Processors
from inflight.ranks.rendezvous import Peer, gather_hosts, meet, own_addresses
from inflight.ranks.topology import Host, this_host
from tests.ranks.peers import make_host
from tests.ranks.thread_world import PATIENCE_S, ThreadWorld, make_worlds, on_all

NEAR = [make_host(pid) for pid in range(3)]
FAR = [make_host(pid, network=pid) for pid in range(3)]


def meet_all(worlds: Sequence[ThreadWorld], hosts: Sequence[Host] = NEAR) -> list[tuple[Peer, ...]]:
    return on_all(len(worlds), lambda rank: meet(worlds[rank], hosts))


@contextlib.contextmanager
def closing(met: list[tuple[Peer, ...]]) -> Iterator[list[tuple[Peer, ...]]]:
    yield met
    for peers in met:
        for peer in peers:
            peer.connection.close()


def assert_connected(met: list[tuple[Peer, ...]]) -> None:
    """Assert that rank 0 is connected with each other rank, under the right numbers."""
    leaders, *others = met
    assert [(peer.rank, peer.host.pid) for peer in leaders] == [(1, 1), (2, 2)]
    for mine, (theirs,) in zip(leaders, others):
        assert (theirs.rank, theirs.host.pid) == (0, 0)
        mine.connection.sendall(bytes([mine.rank]))
        theirs.connection.settimeout(PATIENCE_S)
        assert theirs.connection.recv(10) == bytes([mine.rank])
        assert mine.leader_address == theirs.leader_address


def test_ranks_of_one_network_meet_at_its_loopback():
    with closing(meet_all(make_worlds(3))) as met:
        assert_connected(met)
        assert {peer.leader_address for peers in met for peer in peers} == {"127.0.0.1"}


@pytest.mark.skipif(not own_addresses(), reason="no network but the loopback")
def test_ranks_of_several_networks_meet_at_rank_0s_addresses():
    with closing(meet_all(make_worlds(3), FAR)) as met:
        assert_connected(met)
        assert met[1][0].leader_address in own_addresses()


# -------------------------------------------------------------------- strangers


@dataclass
class Meddled(ThreadWorld):
    """A world that changes rank 0's message before a rank reads it."""

    def __init__(self, world: ThreadWorld, meddle: Callable[[dict], dict]) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._meddle = world, meddle

    def broadcast(self, message: bytes = b"") -> bytes:
        said = self._world.broadcast(message)
        return msgspec.msgpack.encode(self._meddle(msgspec.msgpack.decode(said)))


def call(port: int, said: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    assert len(connection.recv(32)) == 32  # rank 0's challenge
    connection.sendall(said)
    return connection


def test_strangers_that_connect_are_ignored():
    strangers: list[socket.socket] = []

    def come_first(invitation: dict) -> dict:
        port = invitation["port"]
        rank_1 = (1).to_bytes(4, "big")
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)),
            bytes(32) + rank_1 + bytes(32) + b"\1",
        ):
            strangers.append(call(port, said))
        gone = call(port, b"")
        gone.close()
        return invitation

    worlds = make_worlds(3)
    with closing(meet_all([worlds[0], Meddled(worlds[1], come_first), worlds[2]])) as met:
        assert_connected(met)
    assert len(strangers) == 4
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError), stranger:
            assert stranger.recv(100) == b"", "a stranger was told something"


def test_a_rank_of_another_start_is_refused():
    worlds = make_worlds(3)
    other = Meddled(worlds[1], lambda invitation: {**invitation, "secret": bytes(32)})
    outcomes: list[object] = [None] * 3

    def work(rank: int) -> None:
        world = other if rank == 1 else worlds[rank]
        try:
            outcomes[rank] = meet(world, NEAR, timeout_s=2.0)
        except ConfigError as error:
            outcomes[rank] = str(error)

    on_all(3, work)
    assert outcomes[0] == "these ranks did not connect to rank 0 (ant) within 2 s: 1 (ant, pid 1)"
    assert "rank 1 (ant) does not reach rank 0 (ant) at TCP port" in outcomes[1]
    assert "127.0.0.1: another program answers" in outcomes[1]
    outcomes[2][0].connection.close()


@pytest.fixture
def impostor() -> Iterator[Callable[[int], str]]:
    """Listen at another address on the same port, send arbitrary messages, and return the address."""
    listening = socket.socket()

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(bytes(64))

    def start(port: int) -> str:
        listening.bind(("127.0.0.2", port))
        listening.listen()
        threading.Thread(target=serve, daemon=True).start()
        return "127.0.0.2"

    yield start
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def test_a_stranger_at_an_address_is_skipped(impostor):
    worlds = make_worlds(2)

    def mislead(invitation: dict) -> dict:
        return {**invitation, "addresses": (impostor(invitation["port"]), "127.0.0.1")}

    def work(rank: int) -> tuple[Peer, ...]:
        return meet(Meddled(worlds[1], mislead), FAR) if rank else meet(worlds[0], NEAR)

    with closing(on_all(2, work)) as met:
        assert met[1][0].leader_address == "127.0.0.1"


def test_a_rank_that_reaches_no_peer_lists_the_addresses_tried():
    worlds = make_worlds(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    mislead = Meddled(worlds[1], lambda invitation: {**invitation, "addresses": ["127.0.0.1"], "port": port})

    def work(rank: int) -> str:
        with pytest.raises(ConfigError) as raised:
            meet(mislead, FAR) if rank else meet(worlds[0], NEAR, timeout_s=1.0)
        return str(raised.value)

    said = on_all(2, work)
    assert f"TCP port {port} (127.0.0.1: Connection refused)" in said[1]


# -------------------------------------------------------------------- hosts


def test_a_gathered_host_equals_this_host_and_its_processors():
    worlds = make_worlds(2)
    host = on_all(2, lambda rank: gather_hosts(worlds[rank]))[1][0]
    assert host == this_host()
    assert host.pid == os.getpid()
    assert (host.cores, host.quota) == (Processors.here().cores, Processors.here().quota)


def test_ranks_share_a_machine_by_name_and_a_network_by_namespace():
    one = make_host(1)
    assert one.shares_machine_with(make_host(2)) and one.shares_network_with(make_host(2))
    assert one.shares_machine_with(make_host(2, network=9)) and not one.shares_network_with(
        make_host(2, network=9)
    )
    assert not one.shares_machine_with(make_host(2, name="bee"))
    assert not one.shares_network_with(make_host(2, name="bee"))


def test_own_addresses_are_numeric_and_not_loopback():
    for address in own_addresses():
        assert socket.inet_aton(address)
        assert not address.startswith("127.")
