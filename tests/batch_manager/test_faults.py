"""Faulty requests end alone; hanging loops are reported; metrics are published after the last request."""

from __future__ import annotations

import json
import threading

import pytest

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.statistics_rings import StatisticsRings
from inflight.batch_manager.watchdog import Watchdog
from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import MemoryUsage
from inflight.core.request.request import Origin, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.scheduler import Scheduler
from inflight.errors import Unavailable
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens

from .test_gpt_manager import LIMITS, Harness


class PickyEngine(FakeEngine):
    """An engine that raises for a row of request `faulty` with at least `from_token` cached tokens."""

    def __init__(self, faulty: int, from_token: int, in_decode: bool) -> None:
        super().__init__(LIMITS)
        self.faulty, self.from_token, self.in_decode = faulty, from_token, in_decode
        self.num_failures = 0
        self._ids: dict[int, int] = {}

    def forward(self, batch):
        self._ids.update({start.slot: start.request.request_id for start in batch.starts})
        if not self.in_decode:
            self._object(batch)
        return super().forward(batch)

    def decode(self, batch, logits):
        output = super().decode(batch, logits)
        if self.in_decode:
            self._object(batch)
        return output

    def _object(self, batch) -> None:
        ends = {chunk.slot: chunk.start + len(chunk.token_ids) for chunk in batch.context}
        for slot in (*ends, *batch.generation_slots):
            end = ends.get(slot, self._slots[slot].num_tokens + 1 if slot in self._slots else 0)
            if self._ids.get(slot) == self.faulty and end >= self.from_token:
                self.num_failures += 1
                raise ValueError("no such luck")


@pytest.mark.parametrize("in_decode", [False, True], ids=["in forward", "in decode"])
@pytest.mark.parametrize("policy", list(CapacityPolicy))
@pytest.mark.parametrize("from_token", [1, 9], ids=["in its context", "in generation"])
def test_only_the_faulty_request_ends(in_decode, policy, from_token):
    engine = PickyEngine(faulty=3, from_token=from_token, in_decode=in_decode)
    harness = Harness(engine, SchedulingConfig(policy=policy))
    prompts = {i: (i, i + 1, i + 2, 7, 7) for i in range(1, 7)}
    harness.pending += [Request(i, prompt, 12, streaming=i % 2 == 0) for i, prompt in prompts.items()]
    while harness.manager.step():
        pass
    finals = {response.request_id: response for response in harness.responses if response.is_final}
    assert sorted(finals) == sorted(prompts)
    assert finals[3].error is not None and "ValueError: no such luck" in str(finals[3].error)
    for i in set(prompts) - {3}:
        said = [r.result.output_token_ids[0] for r in harness.responses if r.request_id == i]
        tokens = [token for part in said for token in part]
        expected = expected_tokens(prompts[i], 12, LIMITS.vocab_size)
        assert tokens == (expected if i % 2 == 0 else [*prompts[i], *expected])
    assert 1 <= engine.num_failures <= 4  # batches of all four rows, of two and of one


def test_the_log_line_of_an_iteration_with_one_request_has_its_id(caplog: pytest.LogCaptureFixture):
    harness = Harness(PickyEngine(faulty=2, from_token=1, in_decode=False))
    harness.pending += [Request(i, (i, i + 1), 3, origin=Origin("openai", f"id-{i}")) for i in (1, 2, 3)]
    while harness.manager.step():
        pass
    told = [(record.args, getattr(record, "request_id", "")) for record in caplog.records if record.args]
    assert [request_id for (_, num_rows), request_id in told if num_rows == 1] == ["id-2"]
    assert {request_id for (_, num_rows), request_id in told if num_rows > 1} == {""}


@pytest.mark.parametrize("from_token", [0, 9], ids=["at its admission", "in generation"])
def test_only_the_request_that_cannot_be_scheduled_ends(monkeypatch, from_token):
    harness = Harness()
    original = MicroBatchScheduler.select

    def select(self, running, num_in_flight=0):
        if any(r.request_id == 3 and r.next_position >= from_token for r in running):
            raise ValueError("no such luck")
        return original(self, running, num_in_flight)

    monkeypatch.setattr(MicroBatchScheduler, "select", select)
    harness.pending += [Request(i, (i, 7, 7), 12) for i in range(1, 7)]
    while harness.manager.step():
        pass
    assert not harness.deaths
    finals = {response.request_id: response for response in harness.responses if response.is_final}
    assert sorted(finals) == list(range(1, 7))
    assert "could not be scheduled: ValueError: no such luck" in str(finals[3].error)
    for i in set(finals) - {3}:
        expected = [i, 7, 7, *expected_tokens((i, 7, 7), 12, LIMITS.vocab_size)]
        assert list(finals[i].result.output_token_ids[0]) == expected


def test_a_failure_that_does_not_repeat_ends_no_request():
    engine = PickyEngine(faulty=1, from_token=1, in_decode=False)
    harness = Harness(engine)
    harness.pending += [
        Request(1, (1, 2), 5),
        Request(2, (3, 4), 5, sampling=SamplingConfig(beam_width=2)),
    ]
    harness.manager.step()
    engine.faulty = 0
    while harness.manager.step():
        pass
    assert engine.num_failures == 1
    assert [response.error for response in harness.responses] == [None, None]


def test_a_lost_device_is_not_retried_with_every_request():
    engine = FakeEngine(LIMITS)
    calls = []

    def forward(batch):
        calls.append(batch)
        raise Unavailable("the device fell off")

    engine.forward = forward
    harness = Harness(engine)
    harness.pending += [Request(i, (1, 2), 5) for i in range(4)]
    while harness.manager.step():
        pass
    assert len(calls) == 1
    assert {str(response.error) for response in harness.responses} == {"the device fell off"}


class Loop:
    """A manager with its thread, an engine that can be blocked, and instruments."""

    def __init__(self, **instruments) -> None:
        self.engine = FakeEngine(LIMITS)
        self.entered, self.go_on = threading.Event(), threading.Event()
        forward = self.engine.forward

        def held_up(batch):
            self.entered.set()
            self.go_on.wait()
            return forward(batch)

        self.engine.forward = held_up
        self.pending: list[Request] = []
        self.final = threading.Event()
        self.manager = GptManager(
            self.engine,
            Scheduler(SchedulingConfig(), LIMITS),
            self._get,
            lambda response: self.final.set() if response.is_final else None,
            instruments=Instruments(**instruments),
        )

    def _get(self, max_num: int) -> list[Request]:
        taken, self.pending = self.pending, []
        return taken

    def submit(self, request: Request) -> None:
        self.pending.append(request)
        self.manager.notify()


def test_the_state_lists_running_and_waiting_requests_with_reasons():
    loop = Loop()
    loop.go_on.set()
    idle = json.loads(loop.manager.state(timeout_s=30))
    assert idle["state"]["running"] == idle["state"]["waiting"] == []
    assert idle["state"]["blocks"]["total"] == LIMITS.num_blocks
    loop.go_on.clear()
    loop.submit(Request(5, (1, 2, 3), 10))
    loop.entered.wait()
    asked: list[str] = []
    asking = threading.Thread(target=lambda: asked.append(loop.manager.state(timeout_s=30)))
    asking.start()
    loop.go_on.set()
    asking.join()
    (running,) = json.loads(asked[0])["state"]["running"] or [None]
    assert running is None or running["request_id"] == 5
    loop.manager.shutdown()
    with pytest.raises(Unavailable):
        loop.manager.state(timeout_s=30)


def test_the_state_of_a_hanging_loop_is_read_without_it():
    watchdog = Watchdog(0.001, log=lambda text: None)
    loop = Loop(watchdog=watchdog)
    loop.submit(Request(5, (1, 2, 3), 2))
    loop.entered.wait()
    answer = json.loads(loop.manager.state(timeout_s=0.01))
    assert "finished no iteration within 0.01 s" in answer["unanswered"]
    assert answer["stuck"].startswith("iteration ")
    assert any("held_up" in line for line in answer["threads"])
    (running,) = answer["state"]["running"]
    seen = [running[name] for name in ("request_id", "scheduled_tokens", "computed_tokens", "phase")]
    assert seen == [5, 3, 0, "context"], "as the stuck iteration left it"
    loop.go_on.set()
    loop.final.wait()
    loop.manager.shutdown()


def test_the_state_has_the_statistics_of_the_last_iterations_and_requests():
    instruments = Instruments(
        rings=StatisticsRings(max_request_iterations=2), measure_memory=lambda: MemoryUsage(7, 8, 9)
    )
    harness = Harness(instruments=instruments)
    harness.pending.append(Request(1, (1, 2), 4))
    while harness.manager.step():
        pass
    answer = json.loads(harness.manager.state(timeout_s=0))
    assert [one["numActiveRequests"] for one in answer["recent_iterations"]] == [1, 1, 1, 0]
    generated = [one["requestStats"][0]["numGeneratedTokens"] for one in answer["recent_requests"][:1]]
    assert generated == [3] and len(answer["recent_requests"]) == 2
    for statistics in answer["recent_iterations"]:
        memory = [statistics[f"{kind}MemUsage"] for kind in ("cpu", "gpu", "pinned")]
        assert memory == [7, 8, 9] and statistics["timestamp"]


def test_metrics_are_published_once_more_after_the_last_request():
    told = []
    harness = Harness(instruments=Instruments(return_metrics=lambda *both: told.append(both)))
    harness.pending.append(Request(1, (1, 2), 2))
    while harness.manager.step():
        pass
    harness.manager.step()
    assert [stats.num_active_requests for stats, _ in told] == [1, 0, 0]
    assert len(told) == 3, "metrics that have not changed are not published again"
    assert told[-1][1].output_tokens.num_observations == 1
    harness.pending.append(Request(2, (), 2))  # refused at once
    harness.manager.step()
    assert told[-1][1].failed == {"INVALID_ARG": 1}


def test_metrics_are_those_after_the_current_iteration():
    loop = Loop(measure_memory=lambda: MemoryUsage(7, 8, 9))
    loop.go_on.set()
    loop.submit(Request(1, (1, 2), 2))
    assert loop.final.wait(30)
    reports = loop.manager.reports(ReportKind.METRICS, 30.0)
    stats, metrics = reports.metrics
    assert (stats.num_active_requests, reports.memory.gpu) == (0, 8)
    assert metrics.finished == {FinishReason.LENGTH: 1} and metrics.num_generated_tokens == 2
    loop.manager.shutdown()
    assert loop.manager.reports(ReportKind.METRICS, 30.0) == Reports(), "the loop has ended"


def test_metrics_of_a_hanging_loop_are_not_waited_for():
    loop = Loop()
    loop.submit(Request(1, (1, 2), 2))
    assert loop.entered.wait(30)
    assert loop.manager.reports(ReportKind.METRICS, 0.0) == Reports()
    loop.go_on.set()
    loop.manager.shutdown()


def test_an_error_in_reading_the_state_does_not_end_the_loop(monkeypatch):
    loop = Loop()
    loop.go_on.set()

    def broken(scheduler):
        raise ZeroDivisionError("of the description")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "state", broken)
        with pytest.raises(ZeroDivisionError):
            loop.manager.state(timeout_s=30)
    assert json.loads(loop.manager.state(timeout_s=30))["state"]["running"] == []
    loop.manager.shutdown()
