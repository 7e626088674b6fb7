"""RankEngine: `inflight.core.ports.Engine` for one of several ranks, each of which runs the same batches.

    stage      0                           1  (last)
    forward    receive guesses          ←  guess, send the guesses
               compute, send            →  receive, compute, sample, send the outcome to all ranks
    decode     receive the outcome         return it

Only a batch with draft tokens that a draft head guesses has guesses. Then the earlier stages wait until the last
stage has computed the batches before.

Tokens are sampled by one rank, the first of the last stage, right after its forward pass, so that earlier stages
work on the next batches meanwhile. Its result for a batch, the outcome, is the result on every rank, even if it is
an error. `forward` never raises for a batch: `decode` returns or raises the outcome, on all ranks at the same
point in the order of batches, so that all ranks have the same state at every forward pass.

If a forward pass fails on every rank of a stage before any of them waits for another, the batch fails: the next
stages are notified, and the last stage makes the error the outcome. If it fails on this rank alone, others wait
for this rank or are ahead. This cannot be repaired: `on_failure` reports it so that the ranks are ended. Until
then this rank waits too, because its next collective would be matched with a different collective of the other
ranks. Independent of the device. Loop thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import msgspec

from inflight.core.ports import Runner
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.errors import (
    InflightError,
    StepFailed,
    Unavailable,
    error_from_kind,
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
    """The model part on the rank that samples, which includes the Sampler."""

    def choose(self, batch: ScheduledBatch, logits: Any, /) -> ModelOutput:
        """Sample the tokens and store them as the slots' last tokens, as `Engine.decode` does; called after
        `forward`.

        If it raises, all ranks `forget` the batch later, at the same point in the order of batches.
        """
        ...


class StageLink(Protocol):
    """Connects ranks of the same tensor-parallel index in neighboring stages. Messages arrive in order."""

    def send(self, hidden: Any | None) -> None:
        """Send hidden states to the next stage; None: the batch has failed.

        Does not wait until the hidden states are received.
        """
        ...

    def receive(self, num_rows: int) -> Any | None:
        """Receive hidden states of `num_rows` rows from the previous stage; None if the batch has failed there."""
        ...


class GuessLink(Protocol):
    """Sends draft tokens from a rank of the last stage to the ranks of the same tensor-parallel index in all
    earlier stages. Messages arrive in order."""

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        """Send the draft tokens of a batch; none: the batch has failed.

        Does not wait until they are received.
        """
        ...

    def receive_guesses(self, count: int) -> Sequence[int]:
        """Receive `count` draft tokens; none if the batch has failed."""
        ...


class _Messages:
    """Implements `inflight.core.ports.StageMessages`, and makes up for calls that a failed batch has left out.

    Args:
        batch: The batch.
        mapping: This rank's position.
        link: Connects the neighboring stages.
        guesses: Connects the last stage with the earlier ones.

    Attributes:
        has_failed_elsewhere: Whether another stage has reported that the batch failed there.
    """

    def __init__(self, batch: ScheduledBatch, mapping: Mapping, link: StageLink, guesses: GuessLink) -> None:
        self._batch, self._mapping, self._link, self._guesses = batch, mapping, link, guesses
        self._misses_guesses = bool(batch.num_guesses)
        self._misses_hidden = not mapping.is_first_stage
        self.has_failed_elsewhere = False

    def receive_hidden(self) -> Any:
        self._misses_hidden = False
        hidden = self._link.receive(self._batch.num_tokens)
        if hidden is None:
            self._fail()
        return hidden

    def receive_guesses(self) -> Sequence[int]:
        self._misses_guesses = False
        token_ids = self._guesses.receive_guesses(self._batch.num_guesses)
        if not len(token_ids):
            self._fail()
        return token_ids

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        self._misses_guesses = False
        self._guesses.send_guesses(token_ids)

    def finish(self) -> None:
        """Send and receive what the forward pass did not, so that the next batch gets its own messages."""
        if self._misses_guesses and self._mapping.is_last_stage:
            self.send_guesses(())
        elif self._misses_guesses:
            self._guesses.receive_guesses(self._batch.num_guesses)
        if self._misses_hidden:
            self._link.receive(self._batch.num_tokens)

    def _fail(self) -> NoReturn:
        self.has_failed_elsewhere = True
        raise StepFailed("the iteration that carried this request failed in a pipeline stage")


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of an iteration: the output, or an error's kind and its message, in which names are marked."""

    iteration: int
    output: ModelOutput | None = None
    error_kind: str = ""
    error_message: str = ""

    @classmethod
    def from_error(cls, iteration: int, error: Exception) -> Outcome:
        """Return the outcome of a failed batch; the message has the type of an error from another library."""
        if isinstance(error, InflightError):
            return cls(iteration, None, error.kind, error.marked)
        what = f"the iteration that carried this request failed: {type(error).__name__}: {error}"
        failed = StepFailed(without_places(what))
        return cls(iteration, None, failed.kind, failed.marked)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=error_to_plain)
_DECODER = msgspec.msgpack.Decoder(Outcome, dec_hook=error_from_plain)


@dataclass(slots=True)
class _Flight:
    """A batch between `forward` and `decode`.

    Attributes:
        error: The batch's error on this rank; None: there is none.
        outcome: The outcome, on the rank that samples; None on the others, which receive it later.
    """

    batch: ScheduledBatch
    error: Exception | None = None
    outcome: Outcome | None = None


class RankEngine:
    """One rank's part of a model, in lockstep with the others.

    Args:
        engine: The model part; on the rank that samples a `StageEngine`. Closed with this object.
        mapping: This rank's position.
        link: Connects the neighboring stages; not used with a single stage.
        guesses: Connects the last stage with the earlier ones; not used with a single stage.
        outcomes: Messages from the rank that samples to the others.
        stage: The ranks of this stage, used to find out whether a forward pass failed on all of them or on this
            rank alone.
        on_failure: Called with the iteration in which this rank's forward pass raised; the others finish
            the iteration unless they wait for this rank. Called with NEVER when this rank is no longer in
            lockstep. Must not raise.

    Attributes:
        limits: The limits, equal on all ranks. Iterations do not overlap, as a rank gets the sampled tokens
            only when all ranks have received them.
    """

    def __init__(
        self,
        engine: Runner,
        mapping: Mapping,
        link: StageLink,
        guesses: GuessLink,
        outcomes: MpiOutcomes,
        stage: MpiStage,
        on_failure: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.limits: EngineLimits = replace(engine.limits, overlaps_iterations=False)
        self._engine = engine
        self._sampling_engine = engine if isinstance(engine, StageEngine) else None
        self._mapping = mapping
        self._link, self._guesses = link, guesses
        self._outcomes = outcomes
        self._stage = stage
        self._on_failure = on_failure
        self._in_flight: deque[_Flight] = deque()
        self._cause_of_death = ""

    def forward(self, batch: ScheduledBatch) -> _Flight:
        """Run this rank's part of the forward pass; the sampling rank also samples. Returns what `decode` takes.

        Raises:
            Unavailable: This rank computes, or computed before, a different batch than the other ranks.
        """
        flight = _Flight(batch)
        with self._in_step(batch):
            self._in_flight.append(flight)
            result = self._compute(flight)
            if not self._mapping.is_last_stage:
                self._link.send(result)
            elif self._mapping.is_sampler:
                self._send_outcome(flight, result)
        return flight

    def decode(self, batch: ScheduledBatch, logits: _Flight) -> ModelOutput:
        """Return the output of the oldest batch in flight; `logits` is the result of `forward`.

        Raises:
            RequestError: The batch failed; the same error on all ranks.
            Unavailable: This rank computes, or computed before, a different batch than the other ranks.
        """
        with self._in_step(batch):
            flight = self._in_flight.popleft()
            assert logits is flight, "batches are decoded in the order of their forward passes"
            outcome = self._await(flight)
            if outcome.output is not None:
                assert flight.error is None, "a batch fails on all ranks of a stage"
                if not self._mapping.is_sampler:  # the sampling rank's engine has stored the tokens already
                    self._engine.remember(batch, outcome.output)
                return outcome.output
            self._engine.forget(batch, [later.batch for later in self._in_flight])
        raise error_from_kind(outcome.error_kind, outcome.error_message)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._engine.close()

    def _compute(self, flight: _Flight) -> Any | None:
        """Return this stage's hidden states, or logits on the last stage; None if the batch has failed."""
        batch, mapping = flight.batch, self._mapping
        messages = None
        if mapping.pp_size > 1:
            messages = _Messages(batch, mapping, self._link, self._guesses)
        try:
            return self._engine.forward(batch, messages)
        except Exception as error:  # the other ranks have to know of any error
            if messages is None or not messages.has_failed_elsewhere:
                _log.exception("rank %d failed in iteration %d", mapping.rank, batch.iteration)
                self._on_failure(batch.iteration)
                self._stage.barrier()
            flight.error = error
            return None
        finally:
            if messages is not None:
                messages.finish()

    def _send_outcome(self, flight: _Flight, logits: Any | None) -> None:
        """Determine the batch's outcome, and send it to the other ranks."""
        assert self._sampling_engine is not None, "the rank that samples has a Sampler"
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
        self._outcomes.send_outcome(message)

    def _await(self, flight: _Flight) -> Outcome:
        if flight.outcome is not None:
            self._outcomes.wait_sent()
            return flight.outcome
        outcome = _DECODER.decode(self._outcomes.receive_outcome())
        if outcome.iteration != flight.batch.iteration:
            raise ValueError(
                f"the outcome is of iteration {outcome.iteration}, expected {flight.batch.iteration}"
            )
        return outcome

    @contextmanager
    def _in_step(self, batch: ScheduledBatch) -> Generator[None, None, None]:
        """Retire this rank if the body fails on it alone, as the ranks are then no longer in lockstep."""
        if self._cause_of_death:
            raise Unavailable(self._cause_of_death)
        try:
            yield
        except Exception as error:  # this rank is now ahead of the others, or behind
            rank = self._mapping.rank
            self._cause_of_death = f"rank {rank} failed alone in iteration {batch.iteration}: {error!r}"
            _log.exception("rank %d is no longer in lockstep with the others", rank)
            self._on_failure(NEVER)
            raise Unavailable(self._cause_of_death) from error
