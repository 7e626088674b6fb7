"""Faulty peers at the other end of an endpoint's socket: noise, impostors, engines that hang."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import Unavailable
from tests.endpoint.factories import PATIENCE_S, Batcher, Inbox, make_request


@contextlib.contextmanager
def raw_connection(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(PATIENCE_S)
        connected.connect(path)
        yield connected


def framed(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def read_all(connected: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        while connected.recv(1 << 16):
            pass
    return b""


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        framed(b"\xc1"),
        framed(msgspec.msgpack.encode({"type": "Nothing"})),
        framed(msgspec.msgpack.encode(["nothing"])),
    ],
)
def test_noise_ends_its_own_connection_only(front_end, batcher, path, noise: bytes) -> None:
    inbox = Inbox()
    front_end.submit(make_request(), inbox)
    with raw_connection(path) as noisy:
        noisy.sendall(noise)
        read_all(noisy)
    batcher.answer(batcher.take(), 5)
    assert inbox.final().error is None


@contextlib.contextmanager
def impostor(path: str, *sends: bytes) -> Iterator[None]:
    """Accept a connection like an engine, send given bytes, and read nothing."""
    done = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connected, _ = listener.accept()
            listener.close()
            with connected:
                connected.sendall(b"".join(sends))
                done.wait(PATIENCE_S)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        done.set()
        thread.join(PATIENCE_S)


def hello(path: str) -> bytes:
    """Return the first message of an engine."""
    aside = path + "2"
    server = EndpointServer(Batcher().client, aside)
    with raw_connection(aside) as connected:
        header = connected.recv(4, socket.MSG_WAITALL)
        content = connected.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    server.close()
    return header + content


def test_a_peer_that_is_no_engine_is_refused(path) -> None:
    client = SocketEngineClient(path)
    with impostor(path, framed(b"\x05")), pytest.raises(Unavailable):
        client.describe()
    client.close()


def test_a_connection_with_invalid_messages_is_closed(path) -> None:
    greeting, client, inbox = hello(path), SocketEngineClient(path), Inbox()
    with impostor(path, greeting, framed(b"\x05")), contextlib.suppress(Unavailable):
        client.submit(make_request(), inbox)
        assert isinstance(inbox.final().error, Unavailable)
    client.close()


def test_submit_does_not_wait_for_an_engine_that_hangs(path, monkeypatch) -> None:
    monkeypatch.setattr("inflight.endpoint.client._SEND_TIMEOUT_S", 1)
    greeting, client, inbox = hello(path), SocketEngineClient(path), Inbox()
    with impostor(path, greeting):
        client.submit(make_request(tuple(range(300_000))), inbox)
        assert isinstance(inbox.final().error, Unavailable)
    client.close()
