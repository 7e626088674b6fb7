"""All ranks of a model as threads of one process: real engines in lockstep, without MPI.

For tests. `ThreadRanks` has the interface of one engine. Every rank has its own thread, which processes
batches as a rank's loop does, one call after the other, so that pipeline stages compute different batches at
the same time. All ranks must return the same output for every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.engine.load import MakeGrammars, load_stage, no_grammars
from inflight.ranks.rank_engine import RankEngine
from inflight.ranks.topology import Mapping
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors


class _Meeting:
    """Exchange of tensors between the ranks of a stage."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        self._tensors[rank] = tensor
        self._barrier.wait()
        combined = combine(self._tensors)
        self._barrier.wait()  # no rank may write the next tensor before all have read this one
        return combined

    def leave(self) -> None:
        """Break the barrier, so that other ranks do not wait for a failed one."""
        self._barrier.abort()


class ThreadCollectives:
    """Implements `inflight.engine.collectives.Collectives` for one rank of a stage.

    Attributes:
        size: Number of ranks in the stage.
        num_calls: Number of exchanges with the others.
    """

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.size = size
        self.communicator = self
        self.num_calls = 0
        self._meeting = meeting
        self._rank = rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum, in the order of the ranks."""
        self.num_calls += 1
        return self._meeting.exchange(self._rank, tensor, lambda all_: torch.stack(list(all_)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate by rank along the last dimension."""
        self.num_calls += 1
        return self._meeting.exchange(self._rank, tensor, lambda all_: torch.cat(list(all_), dim=-1))

    def leave(self) -> None:
        """Make further calls raise, the others' too."""
        self._meeting.leave()


class ThreadStageLink:
    """Implements `inflight.ranks.rank_engine.StageLink` for hidden states of a width and dtype."""

    def __init__(
        self,
        before: SimpleQueue[Tensor | None],
        behind: SimpleQueue[Tensor | None],
        width: int,
        dtype: str,
    ) -> None:
        self._before = before
        self._behind = behind
        self._width = width
        self._dtype = getattr(torch, dtype)

    def send(self, hidden: Tensor | None) -> None:
        """Send a tensor to the next stage."""
        self._behind.put(hidden)

    def receive(self, num_rows: int) -> Tensor | None:
        """Return the tensor from the previous stage."""
        hidden = self._before.get()
        if hidden is not None:
            assert hidden.shape == (num_rows, self._width) and hidden.dtype == self._dtype, hidden.shape
        return hidden


class ThreadGuesses:
    """Implements `inflight.ranks.rank_engine.GuessLink` with a queue for each rank."""

    def __init__(
        self, own: SimpleQueue[Sequence[int]], earlier: Sequence[SimpleQueue[Sequence[int]]]
    ) -> None:
        self._own, self._earlier = own, earlier

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        """Send tokens to the earlier stages."""
        for queue in self._earlier:
            queue.put(token_ids)

    def receive_guesses(self, count: int) -> Sequence[int]:
        """Return the tokens from the last stage."""
        token_ids = self._own.get()
        assert len(token_ids) in (0, count)
        return token_ids


class ThreadStage:
    """Replaces `MpiStage` for RankEngine; one object for all ranks of a stage."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def barrier(self) -> None:
        """Wait until all ranks are here; raise BrokenBarrierError after `leave`."""
        self._barrier.wait()

    def leave(self) -> None:
        """Break the barrier: no rank waits for another any more."""
        self._barrier.abort()


class ThreadOutcomes:
    """Replaces `MpiOutcomes` for one rank; `told` has a queue for each receiving rank."""

    def __init__(self, rank: int, told: dict[int, SimpleQueue[bytes]]) -> None:
        self._rank = rank
        self._told = told

    def send_outcome(self, outcome: bytes) -> None:
        """Send the outcome to all other ranks."""
        for queue in self._told.values():
            queue.put(outcome)

    def wait_sent(self) -> None:
        """Do nothing: a queue keeps what was sent."""

    def receive_outcome(self) -> bytes:
        """Return the next outcome."""
        return self._told[self._rank].get()


def _comparable(output: ModelOutput) -> tuple[ModelOutput, dict[int, str]]:
    """Return an output with errors as text, since equal errors do not compare equal."""
    return replace(output, failures={}), {slot: repr(error) for slot, error in output.failures.items()}


class ThreadRanks:
    """Implements `inflight.core.ports.Engine` with `tp_size` times `pp_size` ranks of one checkpoint.

    Attributes:
        stages: Runner or engine of each rank.
        limits: Limits of every rank's engine.
        collectives: By rank.
        mates: By stage.
        failures: (rank, iteration) of every forward pass that raised.
    """

    def __init__(
        self,
        config: EngineConfig,
        tp_size: int,
        pp_size: int = 1,
        processors: LogitsPostProcessors = NO_POST_PROCESSORS,
        make_grammars: MakeGrammars = no_grammars,
        moe_ep_size: int = 1,
    ) -> None:
        mappings = [Mapping(tp_size, pp_size, rank, moe_ep_size) for rank in range(tp_size * pp_size)]
        meetings = [_Meeting(tp_size) for _ in range(pp_size)]
        self.collectives = [ThreadCollectives(meetings[m.pp_rank], m.tp_rank, tp_size) for m in mappings]
        self.stages = [
            load_stage(
                config,
                mapping,
                collectives,
                processors=processors,
                make_grammars=make_grammars,
            )
            for mapping, collectives in zip(mappings, self.collectives)
        ]
        self.limits: EngineLimits = self.stages[0].limits
        assert all(stage.limits == self.limits for stage in self.stages)
        self.mates = [ThreadStage(tp_size) for _ in range(pp_size)]
        self.failures: list[tuple[int, int]] = []
        told = {mapping.rank: SimpleQueue() for mapping in mappings if not mapping.is_sampler}
        # links[r] leads to rank r from the previous stage; links beyond the last rank are not used.
        links = [SimpleQueue() for _ in range(len(mappings) + tp_size)]
        guesses = [SimpleQueue[Sequence[int]]() for _ in mappings]
        self._ranks = [
            RankEngine(
                stage,
                mapping,
                ThreadStageLink(
                    links[mapping.rank],
                    links[mapping.rank + tp_size],
                    stage.decoder_config.stage_width,
                    stage.dtype,
                ),
                ThreadGuesses(guesses[mapping.rank], guesses[mapping.tp_rank : -tp_size : tp_size]),
                ThreadOutcomes(mapping.rank, told),
                self.mates[mapping.pp_rank],
                lambda iteration, rank=mapping.rank: self.failures.append((rank, iteration)),
            )
            for stage, mapping in zip(self.stages, mappings)
        ]
        self._threads = [ThreadPoolExecutor(1, f"rank-{mapping.rank}") for mapping in mappings]

    def forward(self, batch: ScheduledBatch) -> list[Future[Any]]:
        """Start the forward pass on every rank."""
        return [
            thread.submit(rank.forward, batch)
            for rank, thread in zip(self._ranks, self._threads, strict=True)
        ]

    def decode(self, batch: ScheduledBatch, begun: list[Future[Any]]) -> ModelOutput:
        """Return the output of a batch; raise AssertionError unless all ranks return the same."""
        said = [
            thread.submit(lambda rank=rank, flight=flight: rank.decode(batch, flight.result()))
            for rank, flight, thread in zip(self._ranks, begun, self._threads, strict=True)
        ]
        errors = [found.exception() for found in said]
        assert len({repr(error) for error in errors}) == 1, f"the ranks differ: {errors}"
        if errors[0] is not None:
            raise errors[0]
        outputs = [found.result() for found in said]
        assert all(_comparable(output) == _comparable(outputs[0]) for output in outputs), (
            "their outputs differ"
        )
        return outputs[0]

    def close(self) -> None:
        """Free all ranks."""
        for thread in self._threads:
            thread.shutdown()
        for rank in self._ranks:
            rank.close()
