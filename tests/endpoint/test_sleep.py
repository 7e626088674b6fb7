"""Sleep of an engine, in process and over the socket; its memory and its loop are played by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from inflight.core.request.sleep import SleepAction
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import ConfigError, Unavailable, Unsupported
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S, Inbox, delta, make_request
from tests.lines_of import call_for, lines_of

SLEEP, ABORT, WAKE_UP, ASK = SleepAction.SLEEP, SleepAction.ABORT, SleepAction.WAKE_UP, SleepAction.ASK


@dataclass
class FakeMemory:
    """Memory that counts its calls; `problem` makes `load` fail."""

    calls: list[str] = field(default_factory=list)
    problem: str = ""
    can_keep_cache: bool = True

    def release(self, keeps_cache: bool = False) -> None:
        self.calls.append("release weights" if keeps_cache else "release")

    def load(self) -> None:
        if self.problem:
            raise ConfigError(self.problem)
        self.calls.append("load")


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def local(memory: FakeMemory) -> LocalEngineClient:
    return LocalEngineClient(DESCRIPTION, lambda: None, memory=memory)


@pytest.fixture(params=["in process", "socket"])
def client(
    local: LocalEngineClient, path: str, request: pytest.FixtureRequest
) -> Iterator[LocalEngineClient | SocketEngineClient]:
    if request.param == "in process":
        yield local
        return
    server, far = EndpointServer(local, path), SocketEngineClient(path)
    yield far
    far.close()
    server.close()


def refusal(client: LocalEngineClient | SocketEngineClient, **request: bool) -> str:
    """Return the error of a new request; "" if it is accepted."""
    inbox = Inbox()
    submitted = replace(make_request(), **request)
    if isinstance(client, SocketEngineClient):
        client.submit(submitted, inbox)
        return str(inbox.final().error)
    try:
        client.submit(submitted, inbox)
    except Unavailable as error:
        return str(error)
    return ""


def test_an_engine_sleeps_and_wakes(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    assert not client.sleep(ASK, PATIENCE_S)
    assert not client.sleep(WAKE_UP, PATIENCE_S)
    assert client.sleep(SLEEP, PATIENCE_S) and client.sleep(SLEEP, PATIENCE_S)
    assert client.sleep(ASK, PATIENCE_S)
    assert "the engine sleeps" in refusal(client)
    assert client.describe() == DESCRIPTION
    assert not client.sleep(WAKE_UP, PATIENCE_S)
    assert memory.calls == ["release", "load"]


def test_an_engine_may_keep_its_kv_cache(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    assert client.sleep(SLEEP, PATIENCE_S, only_weights=True)
    assert client.sleep(ABORT, PATIENCE_S, only_weights=True)  # it sleeps already
    assert not client.sleep(WAKE_UP, PATIENCE_S, only_weights=True)
    assert client.sleep(ABORT, PATIENCE_S, only_weights=True)
    assert not client.sleep(WAKE_UP, PATIENCE_S)
    assert memory.calls == ["release weights", "load"] * 2


def test_a_kept_kv_cache_may_be_given_back_later(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    client.sleep(SLEEP, PATIENCE_S, only_weights=True)
    assert client.sleep(SLEEP, PATIENCE_S) and client.sleep(SLEEP, PATIENCE_S)
    assert client.sleep(SLEEP, PATIENCE_S, only_weights=True)
    assert memory.calls == ["release weights", "release"]
    with pytest.raises(Unsupported, match="the KV cache was given back too"):
        client.sleep(WAKE_UP, PATIENCE_S, only_weights=True)
    assert client.sleep(ASK, PATIENCE_S)
    assert not client.sleep(WAKE_UP, PATIENCE_S)


def test_an_engine_that_cannot_keep_its_kv_cache_stays_awake(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    memory.can_keep_cache = False
    with pytest.raises(Unsupported, match="this engine cannot keep its KV cache in sleep"):
        client.sleep(ABORT, PATIENCE_S, only_weights=True)
    assert not client.sleep(ASK, PATIENCE_S) and not memory.calls


def test_an_engine_that_cannot_load_its_model_stays_asleep(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    client.sleep(SLEEP, PATIENCE_S)
    memory.problem = "there is too little memory in /srv/models"
    with pytest.raises(Unavailable, match=r"the engine cannot wake up: there is too little memory in …"):
        client.sleep(WAKE_UP, PATIENCE_S)
    assert client.sleep(ASK, PATIENCE_S) and "the engine sleeps" in refusal(client)
    memory.problem = ""
    assert not client.sleep(WAKE_UP, PATIENCE_S)


def test_an_unexpected_error_of_the_device_is_told(
    local: LocalEngineClient, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.sleep(SLEEP, PATIENCE_S)
    with monkeypatch.context() as patch:

        def load() -> None:
            raise RuntimeError("out of memory")

        patch.setattr(memory, "load", load)
        with pytest.raises(Unavailable, match="the engine cannot wake up: out of memory"):
            local.sleep(WAKE_UP, PATIENCE_S)
        assert local.sleep(ASK, 0.0)
    assert not local.sleep(WAKE_UP, PATIENCE_S)


def test_a_front_end_may_connect_while_the_engine_sleeps(local: LocalEngineClient, path: str) -> None:
    local.sleep(SLEEP, PATIENCE_S)
    server, far = EndpointServer(local, path), SocketEngineClient(path)
    assert far.describe() == DESCRIPTION and far.sleep(ASK, PATIENCE_S)
    far.close()
    server.close()


def test_requests_in_flight_and_their_continuations_finish_first(
    local: LocalEngineClient, memory: FakeMemory
) -> None:
    inbox = Inbox()
    local.submit(make_request(), inbox)
    (first,) = local.get_inference_requests(-1)
    sleeping = threading.Thread(target=local.sleep, args=(SLEEP, PATIENCE_S))
    sleeping.start()
    while not refusal(local):
        for request in local.get_inference_requests(-1):
            local.send_response(delta(request.request_id, final=True))
    assert not refusal(local, is_continuation=True)
    assert local.sleep(ASK, 0.0)
    (second,) = local.get_inference_requests(-1)
    local.send_response(delta(first.request_id, final=True))
    assert not memory.calls
    local.send_response(delta(second.request_id, final=True))
    sleeping.join(PATIENCE_S)
    assert memory.calls == ["release"] and inbox.final().error is None
    assert "the engine sleeps" in refusal(local, is_continuation=True)


def test_an_engine_stays_awake_if_requests_do_not_finish(
    local: LocalEngineClient, memory: FakeMemory
) -> None:
    local.submit(make_request(), Inbox())
    with pytest.raises(Unavailable, match=r"requests in flight did not finish in 0 s"):
        local.sleep(SLEEP, 0.0)
    assert not local.sleep(ASK, 0.0) and not memory.calls and not refusal(local)


def test_an_engine_without_the_parameter_cannot_sleep() -> None:
    with pytest.raises(Unsupported, match="enable_sleep_mode is false"):
        LocalEngineClient(DESCRIPTION, lambda: None).sleep(ASK, 0.0)


def test_an_ended_engine_takes_no_such_command(local: LocalEngineClient) -> None:
    local.close()
    with pytest.raises(Unavailable, match="shutting down"):
        local.sleep(SLEEP, 0.0)


def test_log_lines_about_sleep_name_the_clients_request(
    client: LocalEngineClient | SocketEngineClient, memory: FakeMemory
) -> None:
    with lines_of("inflight.endpoint.sleep") as lines:
        call_for("first", client.sleep, SLEEP, PATIENCE_S)
        memory.problem = "no room"
        with pytest.raises(Unavailable):
            call_for("second", client.sleep, WAKE_UP, PATIENCE_S)
        memory.problem = ""
        call_for("third", client.sleep, WAKE_UP, PATIENCE_S)
    assert [line.partition(" request_id=")[2] for line in lines] == ["first", "second", "third"]
