"""Commands for adapters and their answers, over the socket and in process; the adapters are played by the test."""

from __future__ import annotations

import pytest

from inflight.core.request.adapter import LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand, AdapterState
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import NotFound, StepFailed, Unavailable, Unsupported
from tests.endpoint.factories import DESCRIPTION, Batcher, Inbox, make_request
from tests.lines_of import call_for, lines_of

LIST = AdapterCommand(AdapterAction.LIST)


@pytest.mark.parametrize("by_socket", [True, False])
def test_adapter_commands_cross_the_socket(
    front_end: SocketEngineClient, batcher: Batcher, by_socket: bool
) -> None:
    client = front_end if by_socket else batcher.client
    assert client.adapters(LIST, 5.0) == ()
    load = AdapterCommand(AdapterAction.LOAD, "sql", path="sql-v2")
    sql = AdapterState("sql", None, "sql-v2", True, 8, 100)
    assert client.adapters(load, 5.0) == (sql,)
    assert client.adapters(LIST, 5.0) == (sql,)
    assert client.adapters(AdapterCommand(AdapterAction.UNLOAD, "sql"), 5.0) == ()
    again = AdapterCommand(AdapterAction.LOAD, "sql", path="sql-v3", replaces=True)
    client.adapters(again, 5.0)
    assert batcher.adapters.calls == [
        ("load", "sql", "sql-v2", 5.0, False),
        ("unload", "sql", None),
        ("load", "sql", "sql-v3", 5.0, True),
    ]


def test_an_error_of_an_adapter_command_crosses_the_socket(front_end: SocketEngineClient) -> None:
    with pytest.raises(NotFound, match="there is no adapter 7"):
        front_end.adapters(AdapterCommand(AdapterAction.UNLOAD, task_id=7), 5.0)


def test_an_unexpected_exception_does_not_end_the_connection(
    front_end: SocketEngineClient, batcher: Batcher
) -> None:
    batcher.adapters.load = None
    load = AdapterCommand(AdapterAction.LOAD, "sql")
    unexpected = pytest.raises(StepFailed, match="the command could not be carried out")
    with lines_of("inflight.endpoint.server") as lines, unexpected:
        call_for("a", front_end.adapters, load, 5.0)
    assert lines == ["the command could not be carried out request_id=a"]
    assert front_end.adapters(LIST, 5.0) == ()


def test_an_engine_without_adapters_refuses_adapter_commands(path: str) -> None:
    client = LocalEngineClient(DESCRIPTION, lambda: None)
    server = EndpointServer(client, path)
    far = SocketEngineClient(path)
    for each in (client, far):
        with pytest.raises(Unsupported, match="does not accept adapter commands"):
            each.adapters(LIST, 5.0)
    far.close()
    server.close()


WEIGHTS = LoraWeights(Matrix((1, 4), "float32", RawBuffer(bytes(16))), ((0, 0, 1),))


@pytest.mark.parametrize("by_socket", [True, False])
def test_waiting_weights_count_against_the_limit_until_their_request_is_stopped(
    front_end: SocketEngineClient, batcher: Batcher, by_socket: bool
) -> None:
    """Too many waiting uploads refuse a request; one stopped before its weights were fetched no longer counts."""
    client = front_end if by_socket else batcher.client
    request = make_request(lora=LoraRequest(7, weights=WEIGHTS))
    inbox = Inbox()
    handle = client.submit(request, inbox)
    while not batcher.adapters.waiting:
        pass
    assert list(batcher.adapters.waiting.values()) == [16]
    handle.stop()
    while batcher.adapters.waiting:
        pass
    batcher.client.get_inference_requests(-1)
    assert inbox.final().result is not None

    batcher.adapters.max_bytes = 15
    refused = Inbox()
    if by_socket:
        client.submit(request, refused)
        error = refused.final().error
    else:
        with pytest.raises(Unavailable) as raised:
            client.submit(request, refused)
        error = raised.value
    assert isinstance(error, Unavailable) and "too many weights wait" in str(error)
    client.submit(make_request(lora=LoraRequest(7)), Inbox())
    assert batcher.take().lora == LoraRequest(7), "the number alone takes no room"


def test_adapter_commands_are_answered_when_the_engine_disconnects(
    front_end: SocketEngineClient, server: EndpointServer
) -> None:
    front_end.adapters(LIST, 5.0)
    server.close()
    with pytest.raises(Unavailable):
        front_end.adapters(LIST, 5.0)


def test_an_ended_engine_refuses_adapter_commands(batcher: Batcher) -> None:
    batcher.client.close()
    with pytest.raises(Unavailable):
        batcher.client.adapters(LIST, 5.0)


def test_a_refused_request_is_not_kept_for_its_next_round(batcher: Batcher) -> None:
    batcher.adapters.max_bytes = 15
    request = make_request(lora=LoraRequest(7, weights=WEIGHTS), may_be_continued=True)
    with pytest.raises(Unavailable, match="too many weights wait"):
        batcher.client.submit(request, Inbox())
    assert not batcher.client._to_be_continued
