"""A rank's engine: outcomes and errors with their codes, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from inflight.core.ports import StageMessages
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.head_drafts import GUESSED_ON_DEVICE
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.core.schedule.batch import (
    ContextChunk,
    ContextDetails,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.errors import InvalidArgument, RequestError, StepFailed, Unavailable
from inflight.ranks.failure_detector import NEVER
from inflight.ranks.rank_engine import RankEngine
from inflight.ranks.topology import Mapping

LIMITS = EngineLimits(100, 64, 4, 32, 8, num_micro_batches=2)
TOP = TopLogProbs((3, 1), (-0.5, float("-inf")))
OUTPUT = ModelOutput(
    0,
    [(3,), (), (5, 6)],
    [BeamCandidates((0, 1), (7, 8), (-0.25, -1e300), (-0.1, -0.2), (TOP,), (b"\0\1",))],
    {2: TokenDetails((-0.125,), (TOP,), (b"\1\2\3\4",))},
    {1: ContextDetails((-1.5,), b"\xff" * 8)},
)
FAILED = replace(OUTPUT, failures={1: InvalidArgument("bad \udcff row"), 3: StepFailed("broken")})


class FakeStage:
    """A stage that raises `forward_error` and `choose_error`, and records its calls and chosen outputs."""

    limits = LIMITS

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.forward_error: Exception | None = None
        self.choose_error: Exception | None = None
        self.output = OUTPUT
        self.told: list[tuple[Any, ...]] = []

    def forward(self, batch: ScheduledBatch, messages: StageMessages) -> torch.Tensor:
        if self.forward_error:
            raise self.forward_error
        if self.is_last:
            if batch.num_guesses:
                messages.send_guesses(range(batch.num_guesses))
            try:
                messages.receive_hidden()
            except StepFailed:
                self.told.append(("void", batch.iteration))
                raise
        elif batch.num_guesses:
            self.told.append(("guesses", list(messages.receive_guesses())))
        return torch.zeros(1, 4)

    def choose(self, batch: ScheduledBatch, logits: torch.Tensor) -> ModelOutput:
        if self.choose_error:
            raise self.choose_error
        self.told.append(("choose", batch.iteration, self.output))
        return self.output

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        self.told.append(("remember", batch.iteration, output))

    def forget(self, batch: ScheduledBatch, since: tuple[ScheduledBatch, ...] = ()) -> None:
        self.told.append(("forget", batch.iteration, [later.iteration for later in since]))

    def close(self) -> None:
        self.told.append(("close",))


class Wire:
    """The link between two stages of one rank each, and the last stage's outcomes; `settled` counts the calls
    of `settle`."""

    def __init__(self) -> None:
        self.hidden = SimpleQueue[torch.Tensor | None]()
        self.guesses = SimpleQueue[Sequence[int]]()
        self.outcomes: deque[bytes] = deque()
        self.settled = 0

    def send(self, hidden: torch.Tensor | None) -> None:
        self.hidden.put(hidden)

    def receive(self, num_rows: int) -> torch.Tensor | None:
        return self.hidden.get(timeout=60)

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        self.guesses.put(token_ids)

    def receive_guesses(self, count: int) -> Sequence[int]:
        return self.guesses.get(timeout=60)

    def send_outcome(self, outcome: bytes) -> None:
        self.outcomes.append(outcome)

    def wait_sent(self) -> None:
        self.settled += 1

    def barrier(self) -> None:
        """Return at once: the stage has one rank."""

    def receive_outcome(self) -> bytes:
        return self.outcomes.popleft()


class Pair:
    """Two stages, called in turn."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.stages = [FakeStage(is_last=False), FakeStage(is_last=True)]
        self.failures: list[tuple[int, int]] = []
        self.ranks = [
            RankEngine(
                stage,
                Mapping(1, 2, rank),
                self.wire,
                self.wire,
                self.wire,
                self.wire,
                lambda i, rank=rank: self.failures.append((rank, i)),
            )
            for rank, stage in enumerate(self.stages)
        ]

    def forward(self, batch: ScheduledBatch) -> list[Any]:
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda rank: rank.forward(batch), self.ranks))

    def errors(self, batch: ScheduledBatch, begun: list[Any]) -> list[RequestError]:
        found = []
        for rank, flight in zip(self.ranks, begun, strict=True):
            with pytest.raises(RequestError) as raised:
                rank.decode(batch, flight)
            found.append(raised.value)
        return found


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_all_ranks_have_bitwise_the_same_output(pair: Pair) -> None:
    batch = ScheduledBatch(0)
    begun = pair.forward(batch)
    outputs = [rank.decode(batch, flight) for rank, flight in zip(pair.ranks, begun, strict=True)]
    assert outputs == [OUTPUT, OUTPUT]
    assert type(outputs[0].token_ids[0]) is tuple and type(outputs[0].details[2].logits[0]) is bytes
    assert [stage.told for stage in pair.stages] == [[("remember", 0, OUTPUT)], [("choose", 0, OUTPUT)]]
    assert pair.wire.settled == 1


def test_a_row_that_fails_alone_fails_on_every_rank(pair: Pair) -> None:
    pair.stages[1].output = FAILED
    batch = ScheduledBatch(0)
    begun = pair.forward(batch)
    for rank, flight in zip(pair.ranks, begun, strict=True):
        output = rank.decode(batch, flight)
        assert replace(output, failures={}) == OUTPUT
        assert {slot: (type(error), str(error)) for slot, error in output.failures.items()} == {
            1: (InvalidArgument, str(FAILED.failures[1])),
            3: (StepFailed, "broken"),
        }
    assert pair.failures == [], "no forward pass failed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidArgument("no such thing"), InvalidArgument("no such thing")),
        (Unavailable("lost"), Unavailable("lost")),
        (
            FloatingPointError("nan"),
            StepFailed("the iteration that carried this request failed: FloatingPointError: nan"),
        ),
    ],
)
def test_an_error_is_raised_on_all_ranks(pair: Pair, error: Exception, expected: RequestError) -> None:
    pair.stages[1].choose_error = error
    batch = ScheduledBatch(3)
    errors = pair.errors(batch, pair.forward(batch))
    assert [(type(found), str(found)) for found in errors] == [(type(expected), str(expected))] * 2
    assert [stage.told for stage in pair.stages] == [[("forget", 3, [])]] * 2
    assert pair.failures == [], "no forward pass failed"


def test_an_output_that_cannot_be_sent_is_an_error_on_all_ranks(pair: Pair) -> None:
    pair.stages[1].output = ModelOutput(0, [(object(),)])
    batch = ScheduledBatch(0)
    errors = pair.errors(batch, pair.forward(batch))
    assert [type(found) for found in errors] == [StepFailed] * 2


def test_the_failure_of_a_stage_is_passed_on(pair: Pair) -> None:
    """The last stage does not compute and reports the error; the next batch succeeds."""
    pair.stages[0].forward_error = ValueError("broken")
    failed = ScheduledBatch(0)
    begun = pair.forward(failed)
    assert pair.failures == [(0, 0)]
    pair.stages[0].forward_error = None
    well = ScheduledBatch(1)
    pair.stages[1].output = ModelOutput(1)
    begun_well = pair.forward(well)
    errors = pair.errors(failed, begun)
    assert {str(error) for error in errors} == {
        "the iteration that carried this request failed in a pipeline stage"
    }
    assert pair.stages[0].told == [("forget", 0, [1])]
    assert pair.stages[1].told == [("void", 0), ("choose", 1, ModelOutput(1)), ("forget", 0, [1])]
    outputs = [rank.decode(well, flight) for rank, flight in zip(pair.ranks, begun_well, strict=True)]
    assert outputs == [ModelOutput(1)] * 2


def with_guesses(iteration: int, count: int) -> ScheduledBatch:
    """Return a batch with draft tokens that a head has to guess."""
    chunk = ContextChunk(0, 4, (7, *(GUESSED_ON_DEVICE,) * count), True, count, is_generation=True)
    return ScheduledBatch(iteration, context=(chunk,))


def test_earlier_stages_get_the_guesses_of_the_last_one(pair: Pair) -> None:
    batch = with_guesses(0, 3)
    begun = pair.forward(batch)
    assert [rank.decode(batch, flight) for rank, flight in zip(pair.ranks, begun)] == [OUTPUT] * 2
    assert pair.stages[0].told == [("guesses", [0, 1, 2]), ("remember", 0, OUTPUT)]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_leaves_no_guesses_behind(pair: Pair, stage: int) -> None:
    """The other stage does not wait for the failed one, and the next batch has its own guesses."""
    pair.stages[stage].forward_error = ValueError("broken")
    failed = with_guesses(0, 3)
    errors = pair.errors(failed, pair.forward(failed))
    assert [type(error) for error in errors] == [StepFailed] * 2
    assert pair.failures == [(stage, 0)], "the other stage has not failed itself"
    pair.stages[stage].forward_error = None
    well = with_guesses(1, 2)
    pair.stages[1].output = ModelOutput(1)
    begun = pair.forward(well)
    assert [rank.decode(well, flight) for rank, flight in zip(pair.ranks, begun)] == [ModelOutput(1)] * 2
    assert ("guesses", [0, 1]) in pair.stages[0].told
    assert pair.wire.guesses.empty() and pair.wire.hidden.empty()


def test_a_rank_that_hears_another_iterations_outcome_is_unusable(pair: Pair) -> None:
    first, second = (ScheduledBatch(iteration) for iteration in (0, 1))
    flight = pair.ranks[0].forward(first)
    other = Pair()
    other.stages[1].output = ModelOutput(1)
    other.forward(second)
    pair.wire.outcomes = other.wire.outcomes
    with pytest.raises(Unavailable, match="the outcome is of iteration 1, expected 0"):
        pair.ranks[0].decode(first, flight)
    assert pair.failures == [(0, NEVER)]
    for call in (pair.ranks[0].forward, lambda batch: pair.ranks[0].decode(batch, flight)):
        with pytest.raises(Unavailable, match="rank 0 failed alone in iteration 0"):
            call(second)
    assert pair.wire.hidden.qsize() == 1, "it takes no part any more"


def test_a_rank_that_cannot_apply_an_outcome_is_unusable(pair: Pair) -> None:
    batch = ScheduledBatch(0, starts=(SlotStart(0, Request(1, (1,), 1)),))
    begun = pair.forward(batch)
    pair.stages[0].remember = None
    with pytest.raises(Unavailable, match="rank 0 failed alone in iteration 0: TypeError"):
        pair.ranks[0].decode(batch, begun[0])
    assert pair.ranks[1].decode(batch, begun[1]) == OUTPUT
    assert pair.failures == [(0, NEVER)]


def test_closing_frees_the_stage(pair: Pair) -> None:
    for rank in pair.ranks:
        rank.close()
    assert [stage.told for stage in pair.stages] == [[("close",)]] * 2
