"""Each request has one access line, however it ends, and the generation loop writes none of them itself."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import access_log
from inflight.access_log import LOGGER, AccessLog, write_access_lines
from inflight.batch_manager import GptManager
from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import Origin, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import StopReason
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import InvalidArgument, Unavailable
from inflight.log_lines import ACCESS_LOG_VARIABLE, parse_fields
from inflight.testing.fake_engine import FakeEngine
from tests.access_lines import PATIENCE_S, AccessLines, access_lines
from tests.endpoint.factories import DESCRIPTION, Inbox

LIMITS = EngineLimits(
    vocab_size=97, max_sequence_length=200, max_num_sequences=8, num_blocks=60, tokens_per_block=4
)
PROMPT = (3, 1, 4, 1, 5)
FIELDS = {
    "request_id", "front", "model", "client", "prompt_tokens", "output_tokens", "finish_reason", "code", "status",
    "path", "first_token_ms", "total_ms",
}  # fmt: skip
WRITES = {"write", "writelines", "flush", "fsync", "send", "sendall", "sendto", "print", "open"}


class Loop:
    """A client and its batcher, whose loop is the test."""

    def __init__(self) -> None:
        scheduler = Scheduler(SchedulingConfig(CapacityPolicy.MAX_UTILIZATION), LIMITS)
        self.client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: None)
        self.manager = GptManager(
            FakeEngine(LIMITS),
            scheduler,
            self.client.get_inference_requests,
            self.client.send_response,
            self.client.poll_stop_signals,
            start=False,
        )

    def submit(self, request_id: str, new: int = 5, **fields: Any) -> Any:
        origin = Origin("openai", request_id, "tiny", "127.0.0.1:4711")
        request = Request(0, fields.pop("prompt", PROMPT), new, streaming=True, origin=origin, **fields)
        return self.client.submit(request, Inbox())

    def run(self) -> None:
        while self.manager.step():
            pass


@pytest.fixture
def lines() -> Iterator[AccessLines]:
    with access_lines() as found:
        yield found


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.client.close()
    made.manager.shutdown()


def test_a_line_says_who_asked_for_how_much_and_how_it_ended(loop: Loop, lines: AccessLines) -> None:
    loop.submit("a", sampling=SamplingConfig(num_return_sequences=2))
    loop.run()
    line = lines.one()
    assert line["first_token_ms"] <= line["total_ms"]
    del line["first_token_ms"], line["total_ms"]
    assert line == {
        "request_id": "a",
        "front": "openai",
        "model": "tiny",
        "client": "127.0.0.1:4711",
        "prompt_tokens": 5,
        "output_tokens": 10,
        "finish_reason": "LENGTH",
    }


def cancel_before_start(loop: Loop) -> None:
    loop.submit("a").stop()


def cancel_while_running(loop: Loop) -> None:
    handle = loop.submit("a")
    for _ in range(3):
        loop.manager.step()
    handle.stop()


def stop_by_a_stop_string(loop: Loop) -> None:
    handle = loop.submit("a")
    loop.manager.step()
    handle.stop(StopReason.STOP_WORDS)


def let_time_out(loop: Loop) -> None:
    loop.submit("a", new=150, allotted_time_ms=1)


def send_nonsense(loop: Loop) -> None:
    loop.submit("a", new=0)


def lose_the_engine(loop: Loop) -> None:
    loop.submit("a")
    loop.client.fail_all(Unavailable("lost"))


ENDS = {
    cancel_before_start: ("CANCELLED", None),
    cancel_while_running: ("CANCELLED", None),
    stop_by_a_stop_string: ("STOP_WORDS", None),
    let_time_out: ("TIMED_OUT", None),
    send_nonsense: ("ERROR", "INVALID_ARG"),
    lose_the_engine: ("ERROR", "UNAVAILABLE"),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_request_ends_it_has_one_line(
    loop: Loop, lines: AccessLines, end: Callable[[Loop], None]
) -> None:
    end(loop)
    loop.run()
    loop.client.close()
    line = lines.one()
    assert (line["request_id"], line["finish_reason"], line.get("code")) == ("a", *ENDS[end])
    assert line["prompt_tokens"] == 5 and line.keys() <= FIELDS


def test_an_id_is_made_and_requests_without_an_origin_have_no_line(loop: Loop, lines: AccessLines) -> None:
    loop.client.submit(Request(0, PROMPT, 3), Inbox())
    handle = loop.submit("")
    loop.run()
    assert lines.one()["request_id"] == str(handle.request_id)


def test_the_generation_loop_writes_nothing(loop: Loop, lines: AccessLines) -> None:
    written: list[str] = []

    def profile(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in WRITES:
            written.append(function.__name__)

    for number in range(30):
        loop.submit(str(number), new=1 + number)
    sys.setprofile(profile)
    try:
        loop.run()
    finally:
        sys.setprofile(None)
    assert not written
    assert {line["request_id"] for line in lines.wait(30)} == set(map(str, range(30)))
    assert lines.threads == {"access-log"}


class Stuck(AccessLines):
    """A log that takes no line until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.goes_on = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_reached.set()
        assert self.goes_on.wait(PATIENCE_S)
        super().emit(record)


def test_a_log_that_is_stuck_delays_no_request(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_MAX_WAITING", 3)
    with access_lines(Stuck()) as lines:
        assert isinstance(lines, Stuck)
        loop.submit("first")
        loop.run()
        assert lines.is_reached.wait(PATIENCE_S)
        handles = [loop.submit(str(number)) for number in range(10)]
        loop.run()
        assert len(handles) == 10
        lines.goes_on.set()
        found = lines.wait(1 + 1 + 3)
    assert found[1] == {"text": "dropped_lines=7"}
    assert [line["request_id"] for line in [found[0], *found[2:]]] == ["first", "0", "1", "2"]


def test_the_line_of_a_request_whose_engine_is_lost_comes_from_the_front_end(
    tmp_path: Path, lines: AccessLines
) -> None:
    path = str(tmp_path / "e.sock")
    server = EndpointServer(LocalEngineClient(DESCRIPTION, lambda: None), path)
    client = SocketEngineClient(path)
    inbox = Inbox()
    client.submit(Request(0, PROMPT, 3, origin=Origin("triton", "a")), inbox)
    server.close()
    inbox.final()
    line = lines.one()
    assert (line["request_id"], line["code"], line["output_tokens"]) == ("a", "UNAVAILABLE", 0)
    client.close()


def test_a_request_that_the_engine_refuses_has_a_line(tmp_path: Path, lines: AccessLines) -> None:
    path = str(tmp_path / "e.sock")
    engine = LocalEngineClient(DESCRIPTION, lambda: None)
    server, client = EndpointServer(engine, path), SocketEngineClient(path)
    client.describe()
    engine.refuse(Unavailable("the server is shutting down"))
    inbox = Inbox()
    client.submit(Request(0, PROMPT, 3, origin=Origin("triton", "a")), inbox)
    assert isinstance(inbox.final().error, Unavailable)
    assert lines.one()["code"] == "UNAVAILABLE"
    client.close()
    server.close()
    assert len(lines.fields) == 1


def test_the_page_about_the_log_describes_every_front_end() -> None:
    root = Path(__file__).parents[1]
    sources = (path.read_text(encoding="utf-8") for path in (root / "backend" / "inflight").rglob("*.py"))
    fronts = {front for source in sources for front in re.findall(r'Origin\(\s*"(\w+)"', source)}
    (row,) = re.findall(
        r"^\| `front` \|.*", (root / "docs" / "operating.md").read_text(encoding="utf-8"), re.M
    )
    assert set(re.findall(r"`(\w+)` \(", row)) == fronts


def test_lines_are_written_as_text_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = LOGGER.handlers[:]
    LOGGER.handlers.clear()
    try:
        for switch, count in (("0", 0), ("1", 1)):
            monkeypatch.setenv(ACCESS_LOG_VARIABLE, switch)
            LOGGER.handlers.clear()
            stream = io.StringIO()
            write_access_lines(stream)
            log = AccessLog()
            log.refuse(Origin("openai", 'x" y=1\n'), code=InvalidArgument.code)
            log.close()
            assert stream.getvalue().count("\n") == count
        head, _, fields = stream.getvalue().partition(" access] ")
        assert head.startswith("I") and parse_fields(fields)["request_id"] == 'x" y=1\n'
    finally:
        LOGGER.handlers[:] = handlers
        LOGGER.setLevel(logging.NOTSET)
        LOGGER.propagate = True
