"""The endpoint's HTTP server on raw sockets, around an application that repeats its input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from inflight.openai.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from tests.openai_endpoint.serving import PATIENCE_S

UPGRADES = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
) + (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
    "connection: keep-alive, upgrade\r\nUPGRADE: TLS/1.0, IRC/6.9\r\n",
)


LARGE_BYTES = 64 << 20
"""More than the kernel keeps for a connection."""


async def repeat(scope: Any, receive: Any, send: Any) -> None:
    """Answer with method and body; /stream in parts of unknown length, /slow late, /large with much data."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    told = json.dumps({"method": scope["method"], "body": body.decode()}).encode()
    if scope["path"] == "/large":
        told = b"x" * LARGE_BYTES
    headers = [] if scope["path"] == "/stream" else [(b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/stream":
        for part in (b"one ", b"two "):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": told})


MOMENT_S = 0.1
"""Timeout of servers whose timeout is tested; shorter than /slow takes."""


class ShortForSilence(HttpProtocol):
    """Times out soon before the first request."""

    head_timeout_s = MOMENT_S


class ShortForHeads(HttpProtocol):
    """Times out soon after the last received part of a head."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self.head_timeout_s = MOMENT_S
            self._expect_head()


class ShortForBodies(HttpProtocol):
    """Times out soon within a body."""

    body_timeout_s = MOMENT_S


class ShortForReaders(HttpProtocol):
    """Times out soon if its client does not read; `has_given_up` is set when the connection is closed."""

    send_timeout_s = MOMENT_S
    has_given_up = threading.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_given_up.set()


class ShortOnceAsked(HttpProtocol):
    """Times out soon everywhere, except before the first head."""

    body_timeout_s = send_timeout_s = MOMENT_S

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.head_timeout_s = MOMENT_S


@contextmanager
def serving(protocol: type[HttpProtocol]) -> Iterator[tuple[str, int]]:
    """Serve `repeat` with a protocol; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(repeat, http=protocol, ws="none", lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "uvicorn has not started"
        time.sleep(0.005)
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving(HttpProtocol) as found:
        yield found


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE_S)


def talk(address: tuple[str, int], *parts: str | bytes) -> bytes:
    """Return all received bytes until the server closes the connection, as the last request must ask for."""
    with connect(address) as connection:
        for part in parts:
            connection.sendall(part.encode() if isinstance(part, str) else part)
            time.sleep(0.02)  # so that it usually arrives as a separate part
        return read_to_end(connection)


def read_to_end(connection: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            found += part
    return bytes(found)


def read_answer(connection: socket.socket) -> bytes:
    """Return one answer with a Content-Length."""
    with connection.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n"))
        (length,) = re.findall(rb"(?im)^content-length: (\d+)", head)
        return head + b"\r\n" + file.read(int(length))


def post(body: str, more: str = "", path: str = "/", version: str = "1.1") -> str:
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n{body}"


def bodies_of(answer: bytes) -> list[Any]:
    """Return the bodies of all answers, each of them one JSON object."""
    return [json.loads(part.split(b"\r\n\r\n", 1)[1]) for part in answer.split(b"HTTP/1.1 ")[1:]]


LAST = "GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LAST_BODY = {"method": "GET", "body": ""}


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("cut", [0, 5, 60, -3])
def test_an_upgrade_offer_is_ignored_and_later_requests_answered(
    address: tuple[str, int], offer: str, cut: int
) -> None:
    asked = post('{"a": 1}', offer) + LAST
    parts = (asked[:cut], asked[cut:]) if cut else (asked,)
    assert bodies_of(talk(address, *parts)) == [{"method": "POST", "body": '{"a": 1}'}, LAST_BODY]


def test_an_upgrade_offer_may_have_a_chunked_body(address: tuple[str, int]) -> None:
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{UPGRADES[0]}Transfer-Encoding: chunked\r\n\r\n"
    answer = talk(address, head, "3\r\nabc\r\n", "2\r\nde\r\n0\r\n\r\n" + LAST)
    assert bodies_of(answer) == [{"method": "POST", "body": "abcde"}, LAST_BODY]


def test_two_upgrade_offers_in_one_segment_are_ignored(address: tuple[str, int]) -> None:
    answer = talk(address, post("a", UPGRADES[0]) + post("b", UPGRADES[1]) + LAST)
    assert [each["body"] for each in bodies_of(answer)] == ["a", "b", ""]


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    answer = talk(address, post("first", path="/slow") + post("second") + LAST)
    assert [each["body"] for each in bodies_of(answer)] == ["first", "second", ""]


def test_a_stream_to_http_1_0_is_plain_and_ends_with_the_connection(address: tuple[str, int]) -> None:
    head, body = talk(address, post("x", path="/stream", version="1.0")).split(b"\r\n\r\n", 1)
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower()
    assert body == b'one two {"method": "POST", "body": "x"}'
    answer = talk(address, post("x", "Connection: close\r\n", path="/stream"))
    assert b"transfer-encoding: chunked" in answer and answer.endswith(b"0\r\n\r\n")


def test_http_1_0_keeps_a_content_length(address: tuple[str, int]) -> None:
    answer = talk(address, post("x", version="1.0"))
    assert b"content-length: 31" in answer and bodies_of(answer) == [{"method": "POST", "body": "x"}]


def one_byte_too_many(begin: str, more: str) -> str:
    return (begin + more * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("no request\r\n\r\n", 400),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (one_byte_too_many("GET / HTTP/1.1\r\nHost: x\r\nA: ", "a"), 431),
        (one_byte_too_many("GET /", "a"), 431),
        (one_byte_too_many("GET / HTTP/1.1\r\nHost: x\r\n", "a: b\r\n"), 431),
        (one_byte_too_many("", "\r\n"), 431),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
)
def test_malformed_http_is_refused_in_openais_form(address: tuple[str, int], sent: str, status: int) -> None:
    answer = talk(address, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert bodies_of(answer)[0]["error"]["type"] == "invalid_request_error"
    assert re.search(rb"(?m)^x-request-id: [0-9a-f]{32}\r$", answer)


def test_a_client_of_https_is_told_in_the_log_and_as_text(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"), connect(address) as connection:
        context.wrap_socket(connection)
    assert "127.0.0.1 sent TLS (https://) to a port of plain HTTP; take http://" in caplog.text
    answer = talk(address, bytes.fromhex("16030100f8010000f40303") + bytes(240))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert bodies_of(answer)[0]["error"]["message"].startswith(
        "got TLS (https://), expected plain HTTP; take"
    )
    caplog.clear()
    talk(address, b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\x16\x03")  # not at the beginning
    assert not caplog.text


def test_headers_after_a_body_are_bounded(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nA: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * MAX_HEAD_BYTES)


def test_invalid_bytes_after_a_request_do_not_interrupt_its_answer(address: tuple[str, int]) -> None:
    answer = talk(address, post("first", path="/slow") + "rubbish\r\n\r\n")
    assert bodies_of(answer) == [{"method": "POST", "body": "first"}]
    broken = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"
    first, second = bodies_of(talk(address, post("first", path="/slow") + broken))
    assert first["body"] == "first" and "error" in second


def test_headers_after_a_body_are_not_the_next_requests(address: tuple[str, int]) -> None:
    head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = talk(address, head + "1\r\na\r\n0\r\nExpect: 100-continue\r\nA: b\r\n\r\n" + LAST)
    assert [each["body"] for each in bodies_of(answer)] == ["a", ""]


def test_a_connection_without_a_request_is_closed() -> None:
    with serving(ShortForSilence) as address:
        assert talk(address) == b""


@pytest.mark.parametrize("sent", ["GET / HT", "GET / HTTP/1.1\r\nHost: x\r\n", "\r\n"])
def test_an_incomplete_head_times_out(sent: str) -> None:
    with serving(ShortForHeads) as address:
        answer = talk(address, sent)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"x-request-id: " in answer


def test_an_incomplete_body_times_out() -> None:
    with serving(ShortForBodies) as address:
        answer = talk(address, "POST / HTTP/1.1\r\nX-Request-Id: mine\r\nContent-Length: 10\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"\r\nx-request-id: mine\r\n" in answer
    assert "3 bytes of the body were received" in bodies_of(answer)[0]["error"]["message"]


def test_timeouts_apply_to_reused_connections() -> None:
    with serving(ShortForHeads) as address, connect(address) as connection:
        connection.sendall(post("x").encode())
        assert bodies_of(read_answer(connection)) == [{"method": "POST", "body": "x"}]
        connection.sendall(b"GET / HT")
        assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    ShortForReaders.has_given_up.clear()
    with serving(ShortForReaders) as address, connect(address) as connection:
        connection.sendall(post("", path="/large").encode())
        assert ShortForReaders.has_given_up.wait(PATIENCE_S)
        assert len(read_to_end(connection)) < LARGE_BYTES


def test_a_slow_answer_does_not_time_out() -> None:
    with serving(ShortOnceAsked) as address, connect(address) as connection:
        connection.sendall(3 * post("x", path="/slow").encode())
        for _ in range(3):
            assert bodies_of(read_answer(connection)) == [{"method": "POST", "body": "x"}]
