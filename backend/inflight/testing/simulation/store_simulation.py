"""A server that saves its KV blocks in a store, is restarted, and loads them: scheduler, fake device, fake store.

The store is slow, loses blocks, and ends loads early, as the seed decides. Every request must get the result
that it gets alone, no block may be lost, and a block must never be loaded into memory that a sequence uses. The
scenarios are those of `simulated_server`, whose oracles are not used, as they do not know loads.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from inflight.config import SchedulingConfig
from inflight.core.kv.block_store import BlockLoad, LoadResult, SavedPiece, StoreCommands, StoreUpdate
from inflight.core.report.stats import IterationCounts
from inflight.core.request.request import Request
from inflight.core.schedule.batch import EngineLimits, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import QueueFull, StepFailed
from inflight.testing.fake_engine import FakeLogits
from inflight.testing.simulation.integrity import check_integrity

from .device import Breakdown, SimulatedDevice
from .endings import check_endings
from .host_cache import HostCache, with_adapters
from .outcome import RunOutcome
from .scenario import Scenario, time_of_answer

_MAX_ITERATIONS = 4000
_JUNK = -7  # content of a block whose load failed
_NUM_STARTS = 3


@dataclass
class StoreOutcome:
    """Counts of a run, over all starts of the server.

    Attributes:
        num_saved, num_loaded, num_unread: Numbers of blocks.
        num_waits: Iterations in which all that happened was a load.
        num_rebuilds: Failures of `schedule`, after which the scheduler's records are rebuilt.
        num_failed: Failed iterations.
    """

    num_saved: int = 0
    num_loaded: int = 0
    num_unread: int = 0
    num_waits: int = 0
    num_rebuilds: int = 0
    num_failed: int = 0


_T = TypeVar("_T")


@dataclass
class FakeStore:
    """Implements `inflight.core.ports.BlockStore` over the cache of a fake device.

    Attributes:
        device: The device, which changes at a restart.
        saved: The content of saved blocks and snapshots by key; survives a restart.
    """

    rng: random.Random
    device: SimulatedDevice
    saved: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    _now: int = 0
    _saving: list[tuple[int, tuple[bytes, list[int]]]] = field(default_factory=list[Any])
    _loading: list[tuple[int, BlockLoad]] = field(default_factory=list[Any])
    _news: list[bytes] = field(default_factory=list[bytes])

    def restart(self, device: SimulatedDevice) -> None:
        """Forget what was in flight, lose some pieces, and begin with the others on another device."""
        self.device = device
        self._saving.clear()
        self._loading.clear()
        self.saved = {key: content for key, content in self.saved.items() if self.rng.random() < 0.9}
        self._news = list(self.saved)

    @property
    def loading_pieces(self) -> list[SavedPiece]:
        """The pieces that loads will write to."""
        return [piece for _, load in self._loading for piece in load.pieces]

    def carry_out(self, commands: StoreCommands) -> None:
        for key in commands.drops:
            self.saved.pop(key, None)
            self._saving = [each for each in self._saving if each[1][0] != key]
        for piece in commands.saves:
            self._saving.append((self._due(), (piece.key, self._read(piece))))
        for load in commands.loads:
            self._loading.append((self._due(), load))

    def computed(self, num_tokens: int, seconds: float) -> None:
        pass

    def update(self) -> StoreUpdate:
        self._now += 1
        saved, self._news = self._news, []
        dropped: list[bytes] = []
        for key, content in self._take_due(self._saving):
            if self.rng.random() < 0.1:
                dropped.append(key)
            else:
                self.saved[key] = content
                saved.append(key)
        if self.saved and self.rng.random() < 0.2:
            lost = self.rng.choice(list(self.saved))
            del self.saved[lost]
            if self.rng.random() < 0.5:  # otherwise it is noticed by the next load
                dropped.append(lost)
                saved = [key for key in saved if key != lost]
        loads = [self._load(load, dropped) for load in self._take_due(self._loading)]
        return StoreUpdate(tuple(saved), tuple(dropped), tuple(loads))

    def _due(self) -> int:
        return self._now + self.rng.choice([1, 1, 2, 5, 20])

    def _take_due(self, waiting: list[tuple[int, _T]]) -> list[_T]:
        due = [what for at, what in waiting if at <= self._now]
        waiting[:] = [each for each in waiting if each[0] > self._now]
        return due

    def _load(self, load: BlockLoad, dropped: list[bytes]) -> LoadResult:
        for count, piece in enumerate(load.pieces):
            content = self.saved.get(piece.key)
            if content is None or self.rng.random() < 0.05:
                self._write(piece, [_JUNK] * len(self._read(piece)))
                self.saved.pop(piece.key, None)
                dropped.append(piece.key)
                return LoadResult(load.load_id, count)
            self._write(piece, content)
        return LoadResult(load.load_id, len(load.pieces))

    def _read(self, piece: SavedPiece) -> list[int]:
        if piece.is_state:
            return [self.device._snapshots[piece.index]]
        return self.device._cache[piece.index].copy()

    def _write(self, piece: SavedPiece, content: list[int]) -> None:
        if piece.is_state:
            (self.device._snapshots[piece.index],) = content
        else:
            self.device._cache[piece.index] = content.copy()


def draw_conversations(seed: int) -> Scenario:
    """Draw many short requests, in a cache that is too small for them.

    Their common beginnings end inside of blocks. So parts of blocks are copied, while loads evict other blocks.
    """
    rng = random.Random(f"conversations {seed}")
    size, num_slots = rng.choice([4, 8]), rng.choice([3, 4, 6])
    histories = [tuple(rng.choices(range(20), k=4 * size)) for _ in range(rng.choice([2, 3, 4]))]
    arrivals: dict[int, tuple[Request, ...]] = {}
    for request_id in range(1, 25):
        beginning = rng.choice(histories)[: rng.randint(size, 4 * size)]
        tokens = (*beginning, *rng.choices(range(20), k=rng.randint(1, size)))
        at = rng.randint(0, 40)
        arrivals[at] = (*arrivals.get(at, ()), Request(request_id, tokens, rng.randint(1, size)))
    limits = EngineLimits(20, 8 * size, num_slots, rng.randint(7, 12), size)
    return Scenario(
        seed, limits, SchedulingConfig(max_num_tokens=64, enable_chunked_context=True), arrivals, {}
    )


def run_with_store(scenario: Scenario) -> StoreOutcome:
    """Run a scenario, restart the server twice, and run it again on the saved blocks.

    Raises AssertionError if anything is wrong.
    """
    rng = random.Random(f"store {scenario.seed}")
    config = replace(
        scenario.config,
        enable_kv_cache_reuse=True,
        has_block_store=True,
        kv_cache_onboard_blocks=rng.random() < 0.95,
        secondary_offload_min_priority=rng.choice([0, 0, 30, 50]),
    )
    arrivals = {at: tuple(map(_without_metrics, each)) for at, each in scenario.arrivals.items()}
    scenario = replace(scenario, config=config, arrivals=arrivals)
    outcome = StoreOutcome()
    store = FakeStore(rng, SimulatedDevice(scenario.limits, scenario.seed))
    for start in range(_NUM_STARTS):
        store.restart(SimulatedDevice(scenario.limits, scenario.seed + start))
        _OneStart(scenario, store, outcome).run()
    return outcome


def _without_metrics(request: Request) -> Request:
    return replace(request, output=replace(request.output, return_perf_metrics=False))


class _OneStart:
    """The server from one start to the next."""

    def __init__(self, scenario: Scenario, store: FakeStore, outcome: StoreOutcome) -> None:
        self._scenario, self._store, self._outcome = scenario, store, outcome
        self._rng = store.rng
        self._scheduler = Scheduler(scenario.config, scenario.limits)
        self._adapters = HostCache(scenario.seed)
        self._requests = RunOutcome(adapters=self._adapters.given, without_adapter=self._adapters.failed)
        self._in_flight: deque[tuple[ScheduledBatch, FakeLogits | None]] = deque()
        self._iteration = 0

    def run(self) -> None:
        """Run to the end, and check all results."""
        scheduler, saved = self._scheduler, self._scheduler.kv_cache.saved
        assert saved is not None
        while self._iteration <= self._scenario.last_event or scheduler.num_active or saved.loads:
            assert self._iteration < _MAX_ITERATIONS, "the scheduler makes no progress"
            self._step()
            self._iteration += 1
        assert scheduler.kv_cache.pool.num_held == 0, "blocks leaked"
        check_integrity(scheduler)
        for request_id, responses in self._requests.responses.items():
            error = responses[-1].error
            if isinstance(error, QueueFull):
                self._requests.refused.add(request_id)
            elif isinstance(error, StepFailed) and request_id not in self._requests.without_adapter:
                self._requests.convicted.add(request_id)
        check_endings(self._scenario, self._requests)
        self._outcome.num_saved += saved.num_saved
        self._outcome.num_loaded += saved.num_loaded
        self._outcome.num_unread += saved.num_unread
        stats: IterationCounts = scheduler.stats(None)
        assert stats.num_free_blocks == stats.max_num_blocks

    def _step(self) -> None:
        scheduler = self._scheduler
        inputs = self._scenario.inputs(self._iteration)
        inputs = with_adapters(self._adapters, inputs, scheduler.is_active)
        inputs = replace(inputs, blocks=self._store.update())
        responses = scheduler.accept(inputs)
        batch = scheduler.schedule()
        is_rebuilt = self._rng.random() < 0.01
        if is_rebuilt:  # as if `schedule` had raised at its end
            self._outcome.num_rebuilds += 1
            responses += scheduler.recover(StepFailed("planned"), len(self._in_flight))
            batch = None
        self._store.carry_out(scheduler.take_store_commands())
        if batch is not None:
            self._check_blocks(batch)
            self._in_flight.append((batch, self._forward(batch)))
        elif scheduler.num_active and not (self._in_flight or is_rebuilt or scheduler._to_end):
            assert scheduler.can_only_wait, "requests wait, and nothing that they wait for will happen"
            self._outcome.num_waits += 1
        for _ in range(self._scenario.limits.num_due(len(self._in_flight), batch)):
            responses += self._finish(*self._in_flight.popleft())
        self._requests.record(self._iteration, responses)
        if self._rng.random() < 0.2:
            check_integrity(scheduler)

    def _check_blocks(self, batch: ScheduledBatch) -> None:
        """Check that the batch uses no block and no snapshot that a load will overwrite."""
        kv_cache, loading = self._scheduler.kv_cache, self._store.loading_pieces
        used: set[int] = set()
        for llm_request in self._scheduler.running_sequences:
            table = kv_cache._tables[llm_request.key]
            used.update(table.block_ids, *table.tails)
        copied: Sequence[tuple[int, int]] = batch.block_copies
        used.update(block_id for pair in copied for block_id in pair)
        assert not used & {piece.index for piece in loading if not piece.is_state}, (
            "a block is used while it is being loaded"
        )
        snapshots = {save.snapshot for save in batch.state_saves} | {start.snapshot for start in batch.starts}
        assert not snapshots & {piece.index for piece in loading if piece.is_state}, (
            "a snapshot is used while it is being loaded"
        )

    def _forward(self, batch: ScheduledBatch) -> FakeLogits | None:
        if self._rng.random() < 0.02:
            self._outcome.num_failed += 1
            try:
                self._store.device.break_down(batch)
            except (
                Breakdown,
                AssertionError,
                KeyError,
                IndexError,
            ):  # it may have applied a part of the batch
                return None
        try:
            return self._store.device.begin(batch, is_behind_failure=True)
        except (AssertionError, KeyError, IndexError):
            if all(logits is not None for _, logits in self._in_flight):
                raise
            return None  # behind a failed batch

    def _finish(self, batch: ScheduledBatch, logits: FakeLogits | None):
        if logits is not None:
            try:
                output = self._store.device.decode(batch, logits)
            except KeyError:  # a failed batch has forgotten its slots
                logits = None
            else:
                now_ns = time_of_answer(self._iteration)
                return self._scheduler.update(batch, output, now_ns=now_ns)
        return self._scheduler.fail(batch, StepFailed("planned"))
