"""Several tensor-parallel ranks as threads of one process: the real engines, without MPI between them.

For tests. `ThreadRanks` looks like one engine; every batch runs on all its ranks at once, and they have to agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from inflight.core.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.engine.torch import TorchEngine, TorchEngineConfig
from inflight.models.sharding import Shard

_T = TypeVar("_T")


class _Meeting:
    """Where the ranks lay down their tensors and pick up everybody's."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        self._tensors[rank] = tensor
        self._barrier.wait()
        combined = combine(self._tensors)
        self._barrier.wait()  # before that, nobody may lay down the next
        return combined

    def leave(self) -> None:
        """A rank has failed: the others must not wait for it."""
        self._barrier.abort()


class ThreadCollectives:
    """Implements `inflight.engine.torch.collectives.Collectives` for one rank."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.size = size
        self.num_calls = 0
        self._meeting = meeting
        self._rank = rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, added up in the order of the ranks."""
        self.num_calls += 1
        return self._meeting.exchange(self._rank, tensor, lambda all_: torch.stack(list(all_)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """By rank, along the last dimension."""
        self.num_calls += 1
        return self._meeting.exchange(self._rank, tensor, lambda all_: torch.cat(list(all_), dim=-1))


class ThreadRanks:
    """Implements `inflight.core.ports.Engine` with `size` shards of one checkpoint.

    Attributes:
        engines: By rank.
        limits: Of every one.
        collectives: By rank.
    """

    def __init__(self, config: TorchEngineConfig, size: int) -> None:
        meeting = _Meeting(size)
        self._meeting = meeting
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rank")
        self.collectives = [ThreadCollectives(meeting, rank, size) for rank in range(size)]
        self.engines = [
            TorchEngine.load(config, Shard(size, rank), collectives)
            for rank, collectives in enumerate(self.collectives)
        ]
        self.limits: EngineLimits = self.engines[0].limits
        assert all(engine.limits == self.limits for engine in self.engines)

    def forward(self, batch: ScheduledBatch) -> Tensor:
        """The logits of every rank, which are the same bits."""
        logits = self._on_all(lambda rank: self.engines[rank].forward(batch))
        assert all(torch.equal(logits[0], other) for other in logits[1:]), "the ranks' logits differ"
        return logits[0]

    def decode(self, batch: ScheduledBatch, logits: Tensor) -> ModelOutput:
        """What every rank has chosen."""
        copies = [logits, *(logits.clone() for _ in self.engines[1:])]  # they are written over
        outputs = self._on_all(lambda rank: self.engines[rank].decode(batch, copies[rank]))
        assert all(output == outputs[0] for output in outputs[1:]), "the ranks chose differently"
        return outputs[0]

    def close(self) -> None:
        """Free all ranks."""
        for engine in self.engines:
            engine.close()
        self._threads.shutdown()

    def _on_all(self, work: Callable[[int], _T]) -> list[_T]:
        def run(rank: int) -> _T:
            try:
                return work(rank)
            except BaseException:
                self._meeting.leave()
                raise

        return [
            future.result() for future in [self._threads.submit(run, r) for r in range(len(self.engines))]
        ]
