"""A front end of another protocol in a few lines: `serving` has replies, stop strings and endings."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from inflight.core.request.stop import FinishReason
from inflight.errors import AlreadyExists, InflightError
from inflight.prompt import Output
from inflight.serving.in_flight import InFlight, InFlightRequest
from inflight.serving.reply import Reply, new_text
from inflight.serving.response_size import ResponseBudget
from inflight.serving.sender import Sender
from tests.tensors.factories import make_prompt
from tests.triton.factories import FakeEngineClient, make_response
from tests.triton.letters import letter_tokenizer

WAIT_S = 30


class Lines:
    """A client that reads lines of text; None is the end of the stream."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.is_gone = False

    def send(self, response: str) -> None:
        self.lines.put(response)

    def finish(self, response: str | None = None) -> None:
        if response is not None:
            self.lines.put(response)
        self.lines.put(None)

    def fail(self, error: InflightError) -> None:
        self.finish(f"{error.code}: {error}")

    def is_cancelled(self) -> bool:
        return self.is_gone

    def read(self) -> list[str]:
        return list(iter(lambda: self.lines.get(timeout=WAIT_S), None))


class LineMaker:
    """Maker of responses as lines."""

    def make_response(self, outputs: Sequence[Output]) -> str:
        return "/".join(text for output in outputs for text in output.texts or ())

    def tensor_sizes(self, response: Any) -> list[tuple[str, int]]:
        return []


class LineServer:
    """A server that takes prompts of letters and answers with lines."""

    def __init__(self) -> None:
        self.client = FakeEngineClient(answers_stops=False)
        self.in_flight = InFlight(self.client)
        self.sender = Sender(self.in_flight, LineMaker(), ResponseBudget())

    def ask(self, request_id: str, stop_strings: tuple[str, ...] = ()) -> tuple[Lines, int]:
        """Return the client, and the engine's id of its request."""
        prompt = make_prompt(options={"streaming": True, "stop_strings": stop_strings}, streaming=True)
        reply = Reply([(prompt, new_text(prompt, letter_tokenizer()))], in_one=False)
        lines = Lines()
        self.in_flight.start(InFlightRequest(request_id, lines, reply), [prompt.request], self.sender.put)
        return lines, self.client.last_id

    def respond(self, engine_id: int, letters: str, reason: FinishReason | None = None) -> None:
        self.client.respond(make_response(engine_id, letter_tokenizer().encode(letters), reason))


@pytest.fixture
def server() -> Iterator[LineServer]:
    made = LineServer()
    yield made
    made.sender.close()


def test_text_is_streamed(server: LineServer) -> None:
    lines, engine_id = server.ask("a")
    server.respond(engine_id, "hel")
    server.respond(engine_id, "lo", FinishReason.LENGTH)
    assert "".join(lines.read()) == "hello"


def test_a_stop_string_ends_the_text_and_the_request(server: LineServer) -> None:
    lines, engine_id = server.ask("a", stop_strings=("lo",))
    server.respond(engine_id, "helloyou")
    assert lines.lines.get(timeout=WAIT_S) == "hel"
    server.sender.wait_until_sent(WAIT_S)
    assert [stopped[0] for stopped in server.client.stopped] == [engine_id]
    server.respond(engine_id, "", FinishReason.CANCELLED)
    assert "".join(lines.read()) == ""


def test_an_id_in_flight_is_refused_unless_its_client_is_gone(server: LineServer) -> None:
    first, first_id = server.ask("a")
    with pytest.raises(AlreadyExists):
        server.ask("a")
    first.is_gone = True
    second, second_id = server.ask("a")
    server.respond(first_id, "", FinishReason.CANCELLED)
    server.respond(second_id, "yes", FinishReason.END_ID)
    assert second.read() == ["yes"]
    assert first.read() == ["CANCELLED: the request was cancelled by its client"]


def test_serving_imports_neither_triton_nor_torch() -> None:
    modules = "completion_text, in_flight, metric_table, reply, sender"
    code = (
        f"from inflight.serving import {modules}; import sys; "
        "sys.exit(any(name == 'torch' or name.startswith('inflight.triton') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
