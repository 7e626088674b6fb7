"""`inflight_client chat` sends lines as a chat, and prints the answers."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inflight_client.__main__ import main
from inflight_client.chat import chat, read_texts


class _Endpoint(BaseHTTPRequestHandler):
    """Answers a chat with its last message in capitals, in two parts; refuses the message `no`."""

    bodies: list[dict]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        self.send_response(400 if text == "no" else 200)
        self.end_headers()
        if text == "no":
            self.wfile.write(json.dumps({"error": {"message": "it is refused"}}).encode())
            return
        for part in (text.upper(), "!"):
            event = {"choices": [{"delta": {"content": part}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    _Endpoint.bodies = []
    with HTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_chat_sends_the_messages_before(url: str) -> None:
    answers = io.StringIO()
    chat(url, "be brief", 5, io.StringIO("one\n\ntwo\n"), answers)
    assert answers.getvalue() == "ONE!\nTWO!\n"
    last = _Endpoint.bodies[-1]
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert last["messages"][2]["content"] == "ONE!" and last["max_tokens"] == 5


def test_a_refusal_has_the_servers_message(url: str) -> None:
    with pytest.raises(ValueError, match="it is refused"):
        chat(url, None, None, io.StringIO("no\n"), io.StringIO())


@pytest.mark.parametrize(
    "event", [b"{", b"[]", b"1", b'{"choices": 1}', b'{"choices": [{}]}', b'{"error": 5}', b"\xff"]
)
def test_an_event_that_is_not_of_a_chat_is_shown(event: bytes) -> None:
    with pytest.raises(ValueError, match="expected an event of a chat, got"):
        list(read_texts([b"data: " + event]))


def test_comments_and_names_of_events_are_skipped() -> None:
    event = json.dumps({"choices": [{"delta": {"content": "one"}}]}).encode()
    lines = [b": still here\n", b"\n", b"event: delta\n", b"data:" + event + b"\n", b"data: [DONE]\n"]
    assert list(read_texts(lines)) == ["one"]


def test_without_a_server_its_address_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"no server answers at http://127\.0\.0\.1:9; inflight serve starts one"
    ):
        chat("http://127.0.0.1:9", None, None, io.StringIO("hello\n"), io.StringIO())


def test_a_server_without_http_is_an_error() -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"\x00\x00\x18\x04")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no HTTP server answers at {url}: --url is the address of /v1"):
            chat(url, None, None, io.StringIO("hello\n"), io.StringIO())
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_short_or_that_of_v1(
    url: str, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["chat", "--url", url.removeprefix("http://") + suffix]) == 0
    assert capsys.readouterr().out == "ONE!\n"
