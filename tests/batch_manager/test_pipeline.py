"""The loop over an engine of several pipeline stages: batches in flight are decoded, or fail, in order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.recording import Begin, End, JsonRecorder
from inflight.batch_manager.replay import IDENTICAL
from inflight.config import SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopSignal
from inflight.core.scheduler import Scheduler
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens

from .recorded import outcome, read
from .test_gpt_manager import LIMITS


class Stages(FakeEngine):
    """An engine that records its calls and fails in given ones.

    Attributes:
        calls: ("forward" or "decode", iteration), in order.
        fails: Calls that raise.
    """

    def __init__(self, count: int, overlaps_iterations: bool) -> None:
        super().__init__(replace(LIMITS, num_micro_batches=count, overlaps_iterations=overlaps_iterations))
        self.calls: list[tuple[str, int]] = []
        self.fails: set[tuple[str, int]] = set()

    def forward(self, batch):
        self._note("forward", batch)
        return super().forward(batch)

    def decode(self, batch, logits):
        self._note("decode", batch)
        return super().decode(batch, logits)

    def _note(self, name: str, batch) -> None:
        self.calls.append((name, batch.iteration))
        if self.calls[-1] in self.fails:
            raise RuntimeError("a stage is on fire")


class WatchedScheduler(Scheduler):
    """A scheduler that records the iterations whose batches came back, failed or not, in `returned`."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.returned: list[int] = []

    def update(self, batch, *rest):
        self.returned.append(batch.iteration)
        return super().update(batch, *rest)

    def fail(self, batch, error):
        self.returned.append(batch.iteration)
        return super().fail(batch, error)


class Loop:
    """A manager that is stepped by the test."""

    def __init__(
        self, count: int, recorder: JsonRecorder | None = None, overlaps_iterations: bool = False
    ) -> None:
        self.engine = Stages(count, overlaps_iterations)
        self.scheduler = WatchedScheduler(SchedulingConfig(), self.engine.limits)
        self.pending: list[Request] = []
        self.stops: list[StopSignal] = []
        self.stats: list[dict] = []
        self.responses: list[Response] = []
        self.manager = GptManager(
            self.engine,
            self.scheduler,
            lambda _: [self.pending.pop(0) for _ in list(self.pending)],
            self.responses.append,
            lambda: [self.stops.pop(0) for _ in list(self.stops)],
            lambda text: self.stats.append(json.loads(text)),
            instruments=Instruments(recorder=recorder),
            start=False,
        )

    def run(self, *requests: Request) -> None:
        self.pending += requests
        while self.manager.step():
            pass

    def in_flight(self) -> list[int]:
        """Count the batches in flight after each call of the engine."""
        counts = [0]
        for name, _ in self.engine.calls:
            counts.append(counts[-1] + (1 if name == "forward" else -1))
        return counts


def prompts(count: int) -> dict[int, tuple[int, ...]]:
    return {i: (i, i + 1, 7) for i in range(1, count + 1)}


def check_tokens(loop: Loop, count: int, new: int) -> None:
    """Assert that each request has the same tokens as alone."""
    assert sorted(r.request_id for r in loop.responses) == sorted(prompts(count))
    for response in loop.responses:
        prompt = prompts(count)[response.request_id]
        assert response.result.output_token_ids[0] == (*prompt, *expected_tokens(prompt, new, 50))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_has_a_batch_in_flight_and_batches_return_in_order(stages):
    loop = Loop(stages)
    loop.run(*(Request(i, prompt, 8) for i, prompt in prompts(4).items()))
    check_tokens(loop, 4, 8)
    counts = loop.in_flight()
    assert max(counts) == stages and counts[-1] == 0
    for wanted in ("forward", "decode"):
        iterations = [iteration for name, iteration in loop.engine.calls if name == wanted]
        assert iterations == sorted(iterations)
    # Between the first contexts and the first end every stage has work.
    steady = counts[2 * stages : -4 * stages]
    assert min(steady) >= stages - 1 and len(steady) > 3


def test_a_single_request_waits_for_each_of_its_tokens():
    loop = Loop(3)
    loop.run(Request(1, (1, 2, 7), 5))
    assert [name for name, _ in loop.engine.calls] == ["forward", "decode"] * 5
    assert list(loop.responses[0].result.output_token_ids[0][3:]) == expected_tokens((1, 2, 7), 5, 50)


@pytest.mark.parametrize("name", ["forward", "decode"])
@pytest.mark.parametrize("stages", [2, 3])
def test_failures_of_batches_are_handled_in_order_and_no_request_loses_a_token(name, stages):
    for iteration in range(10):
        loop = Loop(stages)
        loop.engine.fails.add((name, iteration))
        loop.run(
            *(Request(i, prompt, 8) for i, prompt in prompts(3).items()),
            Request(9, (9, 9), 4, sampling=SamplingConfig(beam_width=2)),
        )
        assert loop.scheduler.returned == sorted(loop.scheduler.returned)
        has_failed = (name, iteration) in loop.engine.calls
        assert not (name == "forward" and has_failed and ("decode", iteration) in loop.engine.calls)
        finals = {response.request_id: response for response in loop.responses}
        assert len(finals) == len(loop.responses) == 4
        for i, prompt in prompts(3).items():
            if finals[i].error is not None:  # it was alone in the batch that failed
                assert has_failed and "a stage is on fire" in str(finals[i].error)
                continue
            assert list(finals[i].result.output_token_ids[0][3:]) == expected_tokens(prompt, 8, 50)
        assert sum(response.error is not None for response in loop.responses) <= 1


def test_a_stop_ends_a_request_when_its_batch_in_flight_is_back():
    loop = Loop(2)
    loop.pending += [Request(i, prompt, 50) for i, prompt in prompts(2).items()]
    for _ in range(5):
        loop.manager.step()
    loop.stops.append(StopSignal(1))
    for _ in range(3):
        loop.manager.step()
    (stopped,) = loop.responses
    assert stopped.is_final and stopped.result.finish_reasons == (FinishReason.CANCELLED,)
    loop.stops.append(StopSignal(2))
    while loop.manager.step():
        pass
    assert len(loop.responses) == 2 and loop.in_flight()[-1] == 0
    assert loop.scheduler.kv_cache.pool.num_held == 0


def test_statistics_name_the_micro_batch():
    loop = Loop(3)
    loop.run(*(Request(i, prompt, 8) for i, prompt in prompts(4).items()))
    with_batch = [told["MicroBatch ID"] for told in loop.stats if told["Scheduled Requests"]]
    assert len(with_batch) > 9 and with_batch == [place % 3 for place in range(len(with_batch))]


def test_a_recorded_pipeline_replays_identically(tmp_path):
    path = tmp_path / "trace"
    limits = replace(LIMITS, num_micro_batches=3)
    loop = Loop(3, JsonRecorder(str(path), SchedulingConfig(), limits))
    loop.engine.fails |= {("forward", 4), ("decode", 9)}
    for _ in range(2):
        loop.run(*(Request(i, prompt, 12, streaming=True) for i, prompt in prompts(6).items()))
    loop.manager.shutdown()
    header, records = read(path)
    assert header.limits == limits and outcome(path)[0] == IDENTICAL
    kinds = [type(record) for record in records]
    assert any(kinds[at : at + 3] == [Begin] * 3 for at in range(len(kinds))), "nothing was in flight"
    assert sum(isinstance(record, End) and record.output is None for record in records) >= 2
