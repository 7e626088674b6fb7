"""Several ranks in step: the same batches, tokens and counters on each, with failures, and a common end."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from dataclasses import replace

import pytest

from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.report.metrics import HistogramSnapshot
from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult
from inflight.core.scheduler import Scheduler
from inflight.errors import Unavailable
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens
from inflight.testing.simulation.integrity import check_integrity
from inflight.testing.simulation.scenario import Scenario, draw, draw_with_a_bad_device
from tests.batch_manager.ranks_in_memory import make_ranks
from tests.tiers import examples

from .several_ranks import Rank, run_in_step
from .test_gpt_manager import LIMITS

SEEDS = range(examples(fast=3, all=15))


def plain(scenario: Scenario) -> Scenario:
    return scenario.in_turn()


def two_stages(scenario: Scenario) -> Scenario:
    return scenario.pipelined(2)


def three_stages(scenario: Scenario) -> Scenario:
    return scenario.pipelined(3)


@pytest.mark.parametrize("kind, num_ranks", [(plain, 2), (two_stages, 4), (three_stages, 3)])
@pytest.mark.parametrize("drawn", [draw, draw_with_a_bad_device])
def test_every_rank_makes_the_same_batches_statistics_and_responses(drawn, kind, num_ranks):
    num_batches = 0
    for seed in SEEDS:
        leader, *followers = run_in_step(kind(drawn(seed)), num_ranks)
        statistics, metrics = leader.statistics(), _counts(leader)
        for follower in followers:
            assert follower.scheduler.batches == leader.scheduler.batches
            assert _untimed(follower.scheduler.responses) == _untimed(leader.scheduler.responses)
            assert follower.statistics() == statistics
            assert _without_timestamps(follower) == _without_timestamps(leader)
            assert _counts(follower) == metrics
            assert not follower.sent
            check_integrity(follower.scheduler)
        num_batches += len(leader.scheduler.batches)
        assert leader.sent == leader.scheduler.responses
        finals = Counter(response.request_id for response in leader.sent if response.is_final)
        assert set(finals.values()) == {1} and len(finals) == 2 * len(drawn(seed).requests)
    assert num_batches > 15 * len(SEEDS)


def test_a_leader_responds_like_a_single_rank():
    for seed in SEEDS:
        (alone,), (leader, _) = (run_in_step(two_stages(draw(seed)), count) for count in (1, 2))
        assert _worded(leader.sent) == _worded(alone.sent)


def _worded(responses: list[Response]) -> list[Response]:
    """Replace errors by their text, so that equal errors compare equal."""
    return [replace(response, error=response.error and repr(response.error)) for response in responses]


def _untimed(responses: list[Response]) -> list[Response]:
    """Drop the times that come from the device."""
    return [
        replace(response, result=response.result and _without_times(response.result))
        for response in _worded(responses)
    ]


def _without_times(result: SequenceResult) -> SequenceResult:
    if result.perf_metrics is None:
        return result
    metrics = replace(result.perf_metrics, first_token_time_ns=0, last_token_time_ns=0)
    return replace(result, perf_metrics=metrics)


def _without_timestamps(rank: Rank) -> list[dict]:
    return [{**json.loads(text), "Timestamp": ""} for text in rank.told]


def _counts(rank: Rank) -> dict:
    """Return the metrics, with the number of observations in place of durations."""
    found = rank.scheduler.metrics()
    values = {name: getattr(found, name) for name in found.__dataclass_fields__}
    tokens = ("prompt_tokens", "output_tokens")
    return {
        name: value.num_observations if isinstance(value, HistogramSnapshot) and name not in tokens else value
        for name, value in values.items()
    }


# ---------------------------------------------------------------------- with threads


class Group:
    """Ranks with a thread each, whose engines can be blocked."""

    def __init__(self, size: int, num_micro_batches: int = 1) -> None:
        self.pending: deque[Request] = deque()
        self.responses: list[Response] = []
        self.finals = threading.Semaphore(0)
        self.deaths: list[str] = []
        self.ranks = make_ranks(size)
        limits = replace(LIMITS, num_micro_batches=num_micro_batches)
        self.engines = [FakeEngine(limits) for _ in self.ranks]
        self.managers = [
            GptManager(
                engine,
                Scheduler(SchedulingConfig(), limits),
                self._get,
                self._send,
                on_death=lambda error: self.deaths.append(str(error)),
                ranks=ranks,
                start=False,
            )
            for engine, ranks in zip(self.engines, self.ranks)
        ]
        self.leader, *self.followers = self.managers

    def start(self) -> None:
        for manager in self.managers:
            manager._thread.start()

    def _get(self, max_num_requests: int) -> list[Request]:
        return [self.pending.popleft() for _ in range(len(self.pending))]

    def _send(self, response: Response) -> None:
        self.responses.append(response)
        if response.is_final:
            self.finals.release()

    def submit(self, *requests: Request) -> None:
        self.pending += requests
        self.leader.notify()

    def await_finals(self, count: int) -> None:
        assert all(self.finals.acquire(timeout=60) for _ in range(count))


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_followers_sleep_between_requests_and_end_when_their_leader_does(num_micro_batches):
    group = Group(3, num_micro_batches)
    group.start()
    for round_ in range(3):
        prompts = {10 * round_ + i: (i, 2, 3) for i in range(5)}
        group.submit(*(Request(request_id, prompt, 7) for request_id, prompt in prompts.items()))
        group.await_finals(5)
        assert json.loads(group.leader.state(timeout_s=60))["state"]["running"] == []
    assert not any(follower.join(timeout_s=0) for follower in group.followers)
    assert group.leader.shutdown(timeout_s=60)
    assert all(follower.join(timeout_s=60) for follower in group.followers)
    assert all(follower.shutdown(timeout_s=60) for follower in group.followers)
    assert not group.deaths
    for response in group.responses:
        prompt = (response.request_id % 10, 2, 3)
        expected = expected_tokens(prompt, 7, LIMITS.vocab_size)
        assert response.result.output_token_ids[0] == (*prompt, *expected)


def test_a_follower_does_not_end_before_its_leader():
    group = Group(2)
    group.start()
    (follower,) = group.followers
    assert not follower.shutdown(timeout_s=0.05)
    group.submit(Request(1, (1, 2), 3))
    group.await_finals(1)
    assert group.leader.shutdown(timeout_s=60) and follower.shutdown(timeout_s=60)


@pytest.mark.parametrize("is_idle", [True, False])
def test_when_a_rank_is_lost_every_loop_ends_and_every_request_is_answered(is_idle, caplog):
    group = Group(3)
    entered, is_lost = threading.Event(), threading.Event()
    forward = group.engines[0].forward

    def held_up(batch):
        entered.set()
        is_lost.wait(60)
        return forward(batch)

    group.engines[0].forward = held_up
    group.start()
    if not is_idle:
        group.submit(*(Request(i, (1, 2), 90) for i in range(3)))
        assert entered.wait(60)
    with caplog.at_level(logging.ERROR):
        group.ranks[0].lose(Unavailable("rank 2 is lost"))
        is_lost.set()
        if is_idle:
            group.submit(*(Request(i, (1, 2), 90) for i in range(3)))
        assert all(manager.join(timeout_s=60) for manager in group.managers)
    ended = [response for response in group.responses if response.is_final]
    assert len(ended) == 3 and group.deaths == ["rank 2 is lost"] * 3
    assert {str(response.error) for response in ended} == {"rank 2 is lost"}
    assert [record.exc_info for record in caplog.records] == [None] * 3
    assert {record.getMessage() for record in caplog.records} == {"the generation loop ends: rank 2 is lost"}


def test_a_leader_whose_loop_dies_answers_shared_requests_once():
    group = Group(2)
    group.leader._scheduler.schedule = lambda: 1 / 0
    group.pending += [Request(i, (1, 2), 9) for i in range(2)]
    group.leader._loop()
    assert [(r.request_id, r.error.code, r.is_final) for r in group.responses] == [
        (0, "UNAVAILABLE", True),
        (1, "UNAVAILABLE", True),
    ]
