"""Findings about the Hugging Face hub: servers that answer, refuse, or do not exist, and proxies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import close_session, constants

from inflight.doctor import network

from .test_machine import GREEN, YELLOW, only


class Hub(BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    close_session()  # the next one reads the variables again
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "status", 200)
    yield
    close_session()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a hub, and return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield address
        server.shutdown()
        thread.join()


def test_a_hub_that_answers(hub: str, monkeypatch: pytest.MonkeyPatch):
    assert only(network.check_hub()).says == f"{hub} answers"
    monkeypatch.setattr(Hub, "status", 404)  # a mirror may have no page at its root
    assert only(network.check_hub()).level is GREEN
    monkeypatch.setattr(Hub, "status", 503)
    found = only(network.check_hub())
    assert found.level is YELLOW and "(status 503)" in found.says


def test_a_hub_that_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    found = only(network.check_hub())
    assert found.level is YELLOW and "http://127.0.0.1:1 cannot be reached (" in found.says
    assert "HF_HUB_OFFLINE=1" in found.mend and "HTTPS_PROXY" in found.mend


def test_the_hub_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:1")
    found = only(network.check_hub())
    assert "http://127.0.0.1:1 cannot be reached" in found.says and "secret" not in found.says + found.mend


def test_a_hub_without_an_answer(monkeypatch: pytest.MonkeyPatch):
    ended = threading.Event()
    monkeypatch.setattr("huggingface_hub.utils.get_session", ended.wait)
    monkeypatch.setattr(network, "_PATIENCE_S", 0.01)
    assert "no answer within" in only(network.check_hub()).says
    ended.set()


def test_no_hub_is_asked_offline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    found = only(network.check_hub())
    assert found.level is GREEN and "HF_HUB_OFFLINE is set" in found.says


def test_a_proxy_is_named_without_its_password(hub: str, monkeypatch: pytest.MonkeyPatch):
    """The server is the proxy to a hub that does not exist."""
    proxy = hub.removeprefix("http://")
    monkeypatch.setenv("http_proxy", f"http://me:secret@{proxy}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    assert only(network.check_hub()).says == f"http://hub.invalid answers through the proxy {proxy}"
    monkeypatch.setattr(Hub, "status", 407)
    found = only(network.check_hub())
    assert found.level is YELLOW and "NO_PROXY" in found.mend and "secret" not in found.says + found.mend
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert network._proxy("http://hub.invalid") is None
