"""The engine's activity as the page gets it, with a fake engine and a fake clock."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from inflight.errors import Unavailable
from inflight.openai.playground.activity import Activity

BLOCKS = {
    "total": 40,
    "held": 10,
    "cached": 3,
    "empty": 27,
    "reserved": 0,
    "shared": 0,
    "tokens_per_block": 32,
}


class Session:
    """An engine client whose `state` returns `reported` as JSON."""

    def __init__(self) -> None:
        self.client = self
        self.num_asked = 0
        self.reported: dict[str, Any] = {}
        self.generated(0)

    def generated(self, count: int, running: int = 2) -> None:
        state = {
            "running": [{}] * running,
            "waiting": [{}],
            "slots": 8,
            "blocks": BLOCKS,
            "generated_tokens": count,
        }
        self.reported = {"queued_requests": 3, "unanswered_requests": 6, "batcher": {"state": state}}

    def state(self, timeout_s: float) -> str:
        self.num_asked += 1
        return json.dumps(self.reported)

    async def wait_for(self, function):
        await asyncio.sleep(0)
        return function()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def read(session: Session, clock: Clock):
    activity = Activity(session, clock)

    def read(after_s: float) -> dict[str, Any]:
        clock.now_s += after_s
        return asyncio.run(activity.read())

    return read


def test_waiting_requests_and_used_blocks_are_sums(read) -> None:
    assert read(0) == {
        "running": 2,
        "waiting": 4,
        "slots": 8,
        "kv_blocks": 40,
        "kv_blocks_used": 10,
        "tokens_per_second": None,
        "problem": "",
    }


def test_the_rate_covers_the_time_since_the_previous_reading(read, session) -> None:
    read(0)
    for after_s, count, rate in [(2.0, 300, 150.0), (1.0, 300, 0.0), (4.0, 301, 0.2)]:
        session.generated(count)
        assert read(after_s)["tokens_per_second"] == rate


@pytest.mark.parametrize(("after_s", "count"), [(60.0, 500), (1.0, 0)])
def test_no_rate_after_a_long_gap_or_an_engine_restart(read, session, after_s, count) -> None:
    session.generated(100)
    read(0)
    session.generated(count)
    assert read(after_s)["tokens_per_second"] is None
    session.generated(count + 7)
    assert read(1.0)["tokens_per_second"] == 7.0


def test_many_pages_ask_the_engine_once(session, clock) -> None:
    activity = Activity(session, clock)

    async def look() -> None:
        for number in (1, 2):
            answers = await asyncio.gather(*(activity.read() for _ in range(20)))
            assert session.num_asked == number and all(answer == answers[0] for answer in answers)
            clock.now_s += 0.6

    asyncio.run(look())


def test_a_hanging_engine_is_reported_as_a_problem(read, session) -> None:
    stuck = "iteration 7 has been running for 61.0 s"
    session.reported["batcher"] |= {
        "unanswered": "the generation loop finished no iteration within 2 s",
        "stuck": stuck,
    }
    figures = read(0)
    assert figures["problem"] == stuck and figures["running"] == 2
    session.reported["batcher"] = {
        "unanswered": "the generation loop finished no iteration within 2 s",
        "stuck": None,
        "state": None,
    }
    figures = read(1)
    assert figures["problem"] == "the generation loop finished no iteration within 2 s"
    assert {figures[name] for name in ("running", "waiting", "kv_blocks", "tokens_per_second")} == {None}


def test_a_client_error_is_raised_and_the_next_reading_asks_again(read, session, monkeypatch) -> None:
    def away(timeout_s: float) -> str:
        raise Unavailable("the engine cannot be reached")

    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="cannot be reached"):
        patch.setattr(session, "state", away)
        read(0)
    assert read(1)["running"] == 2


def test_many_pages_ask_an_unavailable_engine_once(session, clock, monkeypatch) -> None:
    activity = Activity(session, clock)

    def away(timeout_s: float) -> str:
        session.num_asked += 1
        raise Unavailable("the engine cannot be reached")

    async def look() -> None:
        for number in (1, 2):
            answers = await asyncio.gather(*(activity.read() for _ in range(20)), return_exceptions=True)
            assert session.num_asked == number and all(isinstance(answer, Unavailable) for answer in answers)
            clock.now_s += 0.6

    monkeypatch.setattr(session, "state", away)
    asyncio.run(look())
