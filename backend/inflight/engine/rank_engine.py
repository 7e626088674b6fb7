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
collective that it took part in would be another one to the others. Loop thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor

from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.errors import InflightError, StepFailed, Unavailable, error_from_code
from inflight.ranks.failure_detector import NEVER
from inflight.ranks.mapping import Mapping

_log = logging.getLogger(__name__)


class Stage(Protocol):
    """One rank's part of a model: a `Runner`, or a `ModelEngine` at the rank that chooses tokens."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed once it is loaded."""
        ...

    @property
    def decoder_config(self) -> Any:
        """Of the model; has its `hidden_size`."""

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of hidden states."""
        ...

    def forward(self, batch: ScheduledBatch, hidden: Tensor | None) -> Any:
        """Hidden states for the next stage; at the rank that chooses tokens, what `choose` takes."""

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """As `Runner.remember`."""

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """As `Runner.forget`."""

    def close(self) -> None:
        """Free the device's memory. Idempotent."""


class SamplingStage(Stage, Protocol):
    """The part of the rank that chooses tokens."""

    def choose(self, batch: ScheduledBatch, pending: Any) -> ModelOutput:
        """As `ModelEngine.choose`."""
        ...


class StageLink(Protocol):
    """To the same tensor-parallel rank of the stages beside; what is sent arrives in order."""

    def send(self, hidden: Tensor | None) -> None:
        """To the next stage; None: there is none to be had. Does not wait for it to be taken."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """From the stage before; None if that has none."""


class Outcomes(Protocol):
    """From the rank that chooses tokens to all others, in order."""

    def tell(self, outcome: bytes) -> None:
        """The teller's. Does not wait for anybody to hear it."""

    def settle(self) -> None:
        """The teller's, once for each `tell`: wait until the oldest is out of its hands."""

    def hear(self) -> bytes:
        """Everybody else's: the next one."""


class StageMates(Protocol):
    """The ranks that share this stage's layers."""

    def meet(self) -> None:
        """Wait until every one of them has called this as often; none of their other calls counts."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of an iteration: the output, or an error's code and message."""

    iteration: int
    output: ModelOutput | None = None
    error_code: str = ""
    error_message: str = ""

    @classmethod
    def of_error(cls, iteration: int, error: Exception) -> Outcome:
        """An error that is not ours says which it was."""
        if isinstance(error, InflightError):
            return cls(iteration, None, error.code, str(error))
        what = f"the iteration that carried this request failed: {type(error).__name__}: {error}"
        return cls(iteration, None, StepFailed.code, what)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Outcome)


@dataclass(slots=True)
class _Flight:
    """A batch between `forward` and `decode`: why it failed here, if it did, and at the sampler its outcome."""

    batch: ScheduledBatch
    error: Exception | None = None
    outcome: Outcome | None = None


class RankEngine:
    """One rank's part of a model, in step with the others.

    Args:
        stage: The part; closed with this object.
        mapping: Which rank this is.
        link: To the stages beside; not used where there is one.
        outcomes: From the sampler to the others.
        mates: Those beside which this one's forward pass raises, or alone.
        on_failure: Told the iteration in which this rank's forward pass raised, which the others finish unless
            they wait for this rank; and NEVER, when it is not in step with them any more. Must not raise.

    Attributes:
        limits: The same on all ranks; what it chose, a rank feeds when all have heard of it.
    """

    def __init__(
        self,
        stage: Stage,
        mapping: Mapping,
        link: StageLink,
        outcomes: Outcomes,
        mates: StageMates,
        on_failure: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.limits: EngineLimits = replace(stage.limits, overlaps_iterations=False)
        self._stage = stage
        self._mapping = mapping
        self._link = link
        self._outcomes = outcomes
        self._mates = mates
        self._on_failure = on_failure
        self._hidden_size = stage.decoder_config.hidden_size
        self._dtype: torch.dtype = getattr(torch, stage.dtype)
        self._in_flight: deque[_Flight] = deque()
        self._cause_of_death = ""

    def forward(self, batch: ScheduledBatch) -> _Flight:
        """This rank's part of the forward pass, at the sampler the choice of tokens too; for `decode` to take.

        Raises:
            Unavailable: This rank is not in step with the others, now or since earlier.
        """
        flight = _Flight(batch)
        with self._in_step(batch):
            self._in_flight.append(flight)
            result = self._run(flight)
            if not self._mapping.is_last_stage:
                self._link.send(result)
            elif self._mapping.is_sampler:
                self._tell(flight, result)
        return flight

    def decode(self, batch: ScheduledBatch, flight: _Flight) -> ModelOutput:
        """What became of the oldest batch in flight.

        Raises:
            RequestError: It failed; the same on all ranks.
            Unavailable: This rank is not in step with the others, now or since earlier.
        """
        with self._in_step(batch):
            assert flight is self._in_flight.popleft(), (
                "batches are decoded in the order of their forward passes"
            )
            outcome = self._await(flight)
            if outcome.output is not None:
                assert flight.error is None, "a stage fails as a whole"
                self._stage.remember(batch, outcome.output)
                return outcome.output
            self._stage.forget(batch, [later.batch for later in self._in_flight])
        raise error_from_code(outcome.error_code, outcome.error_message)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._stage.close()

    def _run(self, flight: _Flight) -> Any:
        """What this stage makes of what the one before has made; None: nothing."""
        batch, hidden = flight.batch, None
        if not self._mapping.is_first_stage:
            hidden = self._link.receive((batch.num_tokens, self._hidden_size), self._dtype)
            if hidden is None:
                flight.error = StepFailed(
                    "the iteration that carried this request failed in a pipeline stage"
                )
                self._stage.forget(batch)
                return None
        try:
            return self._stage.forward(batch, hidden)
        except Exception as error:
            _log.exception("rank %d failed in iteration %d", self._mapping.rank, batch.iteration)
            self._on_failure(batch.iteration)
            self._mates.meet()
            flight.error = error
            return None

    def _tell(self, flight: _Flight, pending: Any) -> None:
        """The sampler's: decide what became of the batch."""
        iteration, error = flight.batch.iteration, flight.error
        if pending is not None:
            try:
                stage = cast(SamplingStage, self._stage)  # the sampler's rank is given one
                flight.outcome = Outcome(iteration, stage.choose(flight.batch, pending))
                message = _ENCODER.encode(flight.outcome)
            except Exception as chosen_error:
                error = chosen_error
        if error is not None:
            flight.outcome = Outcome.of_error(iteration, error)
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
    def _in_step(self, batch: ScheduledBatch) -> Iterator[None]:
        """Around what fails on no rank, or on this one alone, which is then of no use any more."""
        if self._cause_of_death:
            raise Unavailable(self._cause_of_death)
        try:
            yield
        except Exception as error:
            rank = self._mapping.rank
            self._cause_of_death = f"rank {rank} failed alone in iteration {batch.iteration}: {error!r}"
            _log.exception("rank %d is not in step with the others any more", rank)
            self._on_failure(NEVER)
            raise Unavailable(self._cause_of_death) from error
