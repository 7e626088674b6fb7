"""Adapters for the simulated server: the real cache and commands, with a slow reader that fails when the seed
says so."""

from __future__ import annotations

import random
from collections.abc import Callable

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.commands import AdapterCommands
from inflight.adapters.lora_rows import CheckedAdapter
from inflight.adapters.sources import AdapterFolders
from inflight.core.request.adapter import LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.errors import BadAdapter
from inflight.testing.simulation.host_cache import MAX_RANKS, NUM_TASKS, content, digest_of

from .scheduler import Machine

_BYTES_OF_A_RANK = 12
_LONGEST_READ_S = 2.0


def weights_of(lora: LoraRequest) -> LoraWeights:
    """Return weights for an adapter, with which a request can store it."""
    rank = rank_of(lora)
    data = RawBuffer(bytes(rank * _BYTES_OF_A_RANK))
    return LoraWeights(Matrix((1, 3 * rank), "float32", data), ((0, 0, rank),))


def rank_of(lora: LoraRequest) -> int:
    """Return the rank of an adapter, by its content."""
    return 1 + content(lora, 0) % MAX_RANKS


class AdapterReader:
    """Makes adapter caches for engines, and reads adapters.

    Args:
        machine: The machine.

    Attributes:
        failures: The times in nanoseconds at which reading failed, with the adapter.
        num_read: How many were read.
        max_bytes: Room for adapters in host memory; it always has room for the largest one.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.failures: list[tuple[int, LoraRequest]] = []
        self.num_read = 0
        rng: random.Random = machine.rng
        self._fails = rng.choice([0.0, 0.0, 0.2])
        largest = max(rank_of(LoraRequest(task)) for task in range(NUM_TASKS + 1)) * _BYTES_OF_A_RANK
        self.max_bytes = largest * rng.choice([1, 2, 10])

    def make(self, notify: Callable[[], None]) -> AdapterCommands:
        """Return the cache of an engine with its commands."""
        return AdapterCommands(HostAdapterCache(self._read, self.max_bytes, notify), AdapterFolders({}))

    def _read(self, lora: LoraRequest) -> CheckedAdapter:
        machine = self._machine
        machine.sleep(machine.rng.random() * machine.rng.choice([0.001, _LONGEST_READ_S]))
        if machine.refuses_memory():
            self.failures.append((machine.now_ns, lora))
            raise MemoryError
        if machine.rng.random() < self._fails:
            self.failures.append((machine.now_ns, lora))
            raise machine.rng.choice([BadAdapter("no such adapter"), OSError("the disk failed")])
        self.num_read += 1
        return CheckedAdapter(rank_of(lora), digest_of(lora), weights_of(lora))
