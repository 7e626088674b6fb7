"""Successive engines at one socket: which process may retire an engine, and the engine's end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from inflight.endpoint import client as endpoint_client
from inflight.endpoint.client import SocketEngineClient, retire_predecessor
from inflight.endpoint.frames import FrontEndFrames, Retire, read_frame
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.path import listen, peer_has_this_parent, remove
from inflight.endpoint.server import EndpointServer
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S

LISTEN = """
import sys
from inflight.endpoint.path import listen
listening = listen(sys.argv[1])
print("listening", flush=True)
sys.stdin.read()
"""
CONNECT = """
import socket, sys
from inflight.endpoint.path import peer_has_this_parent
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    print(peer_has_this_parent(connection))
"""


@pytest.fixture
def related(monkeypatch) -> None:
    monkeypatch.setattr(endpoint_client, "peer_has_this_parent", lambda connected: True)


class Engine:
    """A server that can be retired, and records the time that it is given."""

    def __init__(self, path: str) -> None:
        self.told: list[float] = []
        self.client = LocalEngineClient(DESCRIPTION, lambda: None)
        self.server = EndpointServer(self.client, path, self.client.drain, self._retire)

    def _retire(self, timeout_s: float) -> None:
        self.told.append(timeout_s)
        self.server.close()


@pytest.mark.parametrize("program", [None, CONNECT], ids=["a parent", "a sibling"])
def test_only_children_of_one_parent_are_related(path, program):
    command = [sys.executable, "-c", LISTEN, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout.readline() == "listening\n"
        if program is None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                assert not peer_has_this_parent(connection)
        else:
            asked = subprocess.run(
                [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
            )
            assert asked.stdout == "True\n"
        listening.stdin.close()


def test_a_process_is_not_its_own_predecessor(path):
    with listen(path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        assert not peer_has_this_parent(connection)
    remove(path)


def test_retire_waits_until_the_engine_has_ended(path, related):
    engine = Engine(path)
    front_end = SocketEngineClient(path)
    assert front_end.describe() == DESCRIPTION
    assert retire_predecessor(path, 7.5) is True
    assert engine.told == [7.5]
    successor = Engine(path)
    assert front_end.describe() == DESCRIPTION
    front_end.close()
    successor.server.close()


def test_retire_returns_after_all_other_connections_have_ended(path, related):
    Engine(path)
    with contextlib.ExitStack() as opened:
        front_ends = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
        for front_end in front_ends:
            front_end.connect(path)
            read_frame(front_end)  # Hello
        assert retire_predecessor(path, 0.0) is True
        for front_end in front_ends:
            front_end.setblocking(False)
            assert front_end.recv(1) == b""


def test_a_draining_engine_that_sends_no_hello_is_retired(path, related):
    told = []

    def hear_one() -> None:
        connected, _ = listening.accept()
        with connected:
            told.append(FrontEndFrames(connected).read())

    with listen(path) as listening:
        thread = threading.Thread(target=hear_one)
        thread.start()
        assert retire_predecessor(path, 7.5) is True
        thread.join()
    assert told == [Retire(7.5)]


def test_an_engine_of_an_unrelated_process_is_not_retired(path):
    engine = Engine(path)
    assert retire_predecessor(path, 0.0) is False
    assert engine.told == []
    engine.server.close()


def test_retire_without_an_engine_does_nothing(path, related):
    assert retire_predecessor(path, 0.0) is False
    listen(path).close()
    assert retire_predecessor(path, 0.0) is False


def test_waiting_for_an_engine_that_does_not_end_is_bounded(path, related):
    client = LocalEngineClient(DESCRIPTION, lambda: None)
    let_go = threading.Event()
    server = EndpointServer(client, path, client.drain, lambda timeout_s: let_go.wait(PATIENCE_S))
    assert retire_predecessor(path, 0.0, patience_s=0.05) is False
    let_go.set()
    server.close()


def test_a_server_without_a_retire_callback_is_not_retired(path, related):
    client = LocalEngineClient(DESCRIPTION, lambda: None)
    server = EndpointServer(client, path)
    assert retire_predecessor(path, 0.0, patience_s=0.05) is False
    front_end = SocketEngineClient(path)
    assert front_end.describe() == DESCRIPTION
    front_end.close()
    server.close()
