"""RankEngine: `inflight.core.ports.Engine` for one of several ranks, each of which runs the same batches.

    stage      0                1  (last)
    forward    compute, send →  receive, compute, choose tokens, tell everybody
    decode     hear             what was told

Tokens are chosen by one rank, the last stage's first, right after its forward pass, so that the stages before are
busy with the next batches meanwhile. What it makes of a batch, its outcome, is what every rank makes of it, be it
an error. `forward` never raises for a batch: what became of it is said by `decode`, on all ranks at the same place
in the order of batches, so that all ranks remember the same at every forward pass.

A pass that fails on every rank of a stage, before any of them waits for another, fails the batch: the next stages
are told, and the last makes it the outcome. One that fails on this rank alone leaves others waiting, or ahead.
That cannot be mended here: `on_failure` tells whoever ends the ranks. Until then this rank waits too, as the next
collective that it took part in would be another one to the others. Knows no device. Loop thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from inflight.core.ports import Runner
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.errors import (
    InflightError,
    StepFailed,
    Unavailable,
    error_from_code,
    error_from_plain,
    error_to_plain,
    without_places,
)
from inflight.ranks.failure_detector import NEVER
from inflight.ranks.topology import Mapping

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiOutcomes, MpiStage

_log = logging.getLogger(__name__)


@runtime_checkable
class StageEngine(Runner, Protocol):
    """The part of the rank that chooses tokens, which has the sampler."""

    def choose(self, batch: ScheduledBatch, logits: Any, /) -> ModelOutput:
        """Choose the tokens and remember them, as `Engine.decode` does; called right after `forward`.

        If it raises, all ranks `forget` the batch later, at the same place in the order of batches.
        """
        ...


class StageLink(Protocol):
    """To the same tensor-parallel rank of the stages beside; what is sent arrives in order."""

    def send(self, hidden: Any | None) -> None:
        """To the next stage; None: the batch has failed. Does not wait for it to be received."""
        ...

    def receive(self, num_rows: int) -> Any | None:
        """From the stage before, hidden states of so many rows; None if the batch has failed there."""
        ...


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of an iteration: the output, or an error's code and message."""

    iteration: int
    output: ModelOutput | None = None
    error_code: str = ""
    error_message: str = ""

    @classmethod
    def from_error(cls, iteration: int, error: Exception) -> Outcome:
        """The outcome of a batch that failed; an error of another library gets its type into the message."""
        if isinstance(error, InflightError):
            return cls(iteration, None, error.code, str(error))
        what = f"the iteration that carried this request failed: {type(error).__name__}: {error}"
        return cls(iteration, None, StepFailed.code, without_places(what))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=error_to_plain)
_DECODER = msgspec.msgpack.Decoder(Outcome, dec_hook=error_from_plain)


@dataclass(slots=True)
class _Flight:
    """A batch between `forward` and `decode`.

    Attributes:
        error: Why it failed on this rank, if it did.
        outcome: What became of it, where that is known already: on the rank that chooses tokens.
    """

    batch: ScheduledBatch
    error: Exception | None = None
    outcome: Outcome | None = None


class RankEngine:
    """One rank's part of a model, in step with the others.

    Args:
        engine: The part, on the rank that chooses tokens a `StageEngine`; closed with this object.
        mapping: Which rank this is.
        link: To the stages beside; not used where there is one.
        outcomes: From the rank that chooses tokens to the others.
        stage: The ranks that share this stage's layers: all of them raise in a forward pass, or this one alone.
        on_failure: Told the iteration in which this rank's forward pass raised, which the others finish unless
            they wait for this rank; and NEVER, when it is not in step with them any more. Must not raise.

    Attributes:
        limits: The same on all ranks. A rank is fed what was chosen when all have heard of it, so that iterations
            do not overlap.
    """

    def __init__(
        self,
        engine: Runner,
        mapping: Mapping,
        link: StageLink,
        outcomes: MpiOutcomes,
        stage: MpiStage,
        on_failure: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.limits: EngineLimits = replace(engine.limits, overlaps_iterations=False)
        self._engine = engine
        self._sampling_engine = engine if isinstance(engine, StageEngine) else None
        self._mapping = mapping
        self._link = link
        self._outcomes = outcomes
        self._stage = stage
        self._on_failure = on_failure
        self._in_flight: deque[_Flight] = deque()
        self._cause_of_death = ""

    def forward(self, batch: ScheduledBatch) -> _Flight:
        """Run this rank's part of the forward pass, and at the sampler choose the tokens; `decode` takes the rest.

        Raises:
            Unavailable: This rank is not in step with the others, now or since earlier.
        """
        flight = _Flight(batch)
        with self._in_step(batch):
            self._in_flight.append(flight)
            result = self._compute(flight)
            if not self._mapping.is_last_stage:
                self._link.send(result)
            elif self._mapping.is_sampler:
                self._tell(flight, result)
        return flight

    def decode(self, batch: ScheduledBatch, logits: _Flight) -> ModelOutput:
        """The output of the oldest batch in flight; `logits` is what `forward` returned.

        Raises:
            RequestError: It failed; the same on all ranks.
            Unavailable: This rank is not in step with the others, now or since earlier.
        """
        with self._in_step(batch):
            flight = self._in_flight.popleft()
            assert logits is flight, "batches are decoded in the order of their forward passes"
            outcome = self._await(flight)
            if outcome.output is not None:
                assert flight.error is None, "a stage fails as a whole"
                if not self._mapping.is_sampler:  # its engine chose the tokens, and remembers them
                    self._engine.remember(batch, outcome.output)
                return outcome.output
            self._engine.forget(batch, [later.batch for later in self._in_flight])
        raise error_from_code(outcome.error_code, outcome.error_message)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._engine.close()

    def _compute(self, flight: _Flight) -> Any | None:
        """The hidden states or logits that follow from the stage before; None if the batch has failed."""
        batch, hidden = flight.batch, None
        if not self._mapping.is_first_stage:
            hidden = self._link.receive(batch.num_tokens)
            if hidden is None:
                flight.error = StepFailed(
                    "the iteration that carried this request failed in a pipeline stage"
                )
                self._engine.forget(batch)
                return None
        try:
            return self._engine.forward(batch, hidden)
        except Exception as error:  # whatever a device raises: the others have to be told
            _log.exception("rank %d failed in iteration %d", self._mapping.rank, batch.iteration)
            self._on_failure(batch.iteration)
            self._stage.barrier()
            flight.error = error
            return None

    def _tell(self, flight: _Flight, logits: Any | None) -> None:
        """Decide what became of the batch, and tell the other ranks."""
        assert self._sampling_engine is not None, "the rank that chooses tokens has a sampler"
        iteration = flight.batch.iteration
        try:
            if flight.error is not None:
                raise flight.error
            flight.outcome = Outcome(iteration, self._sampling_engine.choose(flight.batch, logits))
            message = _ENCODER.encode(flight.outcome)
        except (
            Exception
        ) as error:  # whatever a device raises, or the error of the forward pass, is the outcome
            flight.outcome = Outcome.from_error(iteration, error)
            message = _ENCODER.encode(flight.outcome)
        self._outcomes.tell(message)

    def _await(self, flight: _Flight) -> Outcome:
        if flight.outcome is not None:
            self._outcomes.settle()
            return flight.outcome
        outcome = _DECODER.decode(self._outcomes.hear())
        if outcome.iteration != flight.batch.iteration:
            raise ValueError(
                f"the outcome is of iteration {outcome.iteration}, expected {flight.batch.iteration}"
            )
        return outcome

    @contextmanager
    def _in_step(self, batch: ScheduledBatch) -> Generator[None, None, None]:
        """Retire this rank if a step fails on it, as it failed on no other and the ranks are out of step."""
        if self._cause_of_death:
            raise Unavailable(self._cause_of_death)
        try:
            yield
        except Exception as error:  # whatever it is, this rank is ahead of the others, or behind
            rank = self._mapping.rank
            self._cause_of_death = f"rank {rank} failed alone in iteration {batch.iteration}: {error!r}"
            _log.exception("rank %d is not in step with the others any more", rank)
            self._on_failure(NEVER)
            raise Unavailable(self._cause_of_death) from error
