"""Invariants of an engine's process, checked after each iteration of its loop, and whenever all threads wait.

After an iteration: each block is free or held, each request is in exactly one place, the counters agree with the
requests, and queues and caches are within their limits. A record that a preempted thread is changing, under a lock
that it holds, is not checked. When all threads wait: nobody waits for something that has happened already.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from inflight.adapters.cache import HostAdapterCache
from inflight.batch_manager import GptManager
from inflight.block_store import store
from inflight.block_store.files import BlockFiles
from inflight.block_store.store import HostBlockStore
from inflight.block_store.tier_counts import TierCounts
from inflight.build import RunningEngine
from inflight.core.ports import BlockStore
from inflight.core.request.response import Response
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.endpoint.delivery import Delivery
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import InflightError
from inflight.ranks.ranked_store import FollowersBlockStore, LeadersBlockStore
from inflight.testing.simulation.integrity import check_integrity

from .scheduler import Fiber, Machine

_FULL_CHECK_EVERY = 10
"""Iterations between two full comparisons of the scheduler's records, which take long."""


if TYPE_CHECKING:
    _Manager = GptManager
else:
    _Manager = object


class _ChecksAfterIterations(_Manager):
    """Checks the invariants after each iteration of the GptManager with which it is combined."""

    machine: Machine

    def __init__(
        self,
        engine: Any,
        scheduler: Scheduler,
        get_requests: Any,
        send_response: Any,
        *args: Any,
        **rest: Any,
    ) -> None:
        self._num_taken = self._num_steps = 0
        self._has_run = self._was_stuck = False
        self._client = getattr(send_response, "__self__", None)  # of rank 0

        def take(max_num: int) -> Any:
            requests = get_requests(max_num)
            self._num_taken += len(requests)
            return requests

        super().__init__(engine, scheduler, take, send_response, *args, **rest)

    def _finish_batch(self, batch: ScheduledBatch, logits: Any) -> list[Response]:
        self._has_run = True
        return super()._finish_batch(batch, logits)

    def _die(self, error: InflightError) -> None:
        if "loop died" in str(error) and not getattr(self._engine, "has_died", False):
            cause = sys.exc_info()[1] or error
            text = "".join(traceback.format_exception(cause))
            self.machine.failure = self.machine.failure or (self.machine.current, cause, text)
        super()._die(error)

    def step(self) -> bool:
        self._has_run = False
        is_busy = super().step()
        try:
            self._check(is_busy)
        except AssertionError as error:  # the loop would take it for a failure of its own
            self.machine.failure = self.machine.failure or (
                self.machine.current,
                error,
                traceback.format_exc(),
            )
        return is_busy

    def _check(self, is_busy: bool) -> None:
        scheduler = self._scheduler
        check_blocks(scheduler)
        self._num_steps += 1
        if self._num_steps % _FULL_CHECK_EVERY == 0:
            check_integrity(scheduler)
        if isinstance(self._client, LocalEngineClient):
            check_requests(self._client, scheduler, self._num_taken)
        check_limits(scheduler)
        self._check_progress(is_busy)
        if (own := _own_store(self._block_store)) is not None:
            check_store(own)
            if own is self._block_store:  # with several ranks the scheduler counts what all have loaded
                check_traffic(scheduler)

    def _check_progress(self, is_busy: bool) -> None:
        """Check that a sequence runs if only waiting ones are left, at the latest in the next iteration."""
        scheduler = self._scheduler
        is_stuck = (
            len(scheduler._waiting) > 0
            and not (self._has_run or self._in_flight or scheduler._running.sequences or scheduler._to_end)
            and not scheduler.is_loading_blocks
        )
        assert not (is_stuck and (self._was_stuck or not is_busy)), "sequences wait although none runs"
        self._was_stuck = is_stuck


def checked(manager: type[GptManager], machine: Machine) -> type[GptManager]:
    """Return a subclass of the loop's manager, perhaps one with a planted mistake, that checks the invariants."""
    names = {"machine": machine, "__module__": manager.__module__}
    return cast(type[GptManager], type("CheckedManager", (_ChecksAfterIterations, manager), names))


# ---------------------------------------------------------------- after an iteration


def check_blocks(scheduler: Scheduler) -> None:
    """Check that each block is held by running sequences and loads, or free."""
    cache, pool = scheduler.kv_cache, scheduler.kv_cache.pool
    num_held = pool.num_blocks - pool._references.count(0)
    assert num_held + pool.num_cached + pool.num_empty == pool.num_blocks, (
        f"{num_held} held + {pool.num_cached} cached + {pool.num_empty} empty != {pool.num_blocks} blocks"
    )
    running = {sequence.key for sequence in scheduler._running.sequences}
    assert cache._tables.keys() == running, f"blocks of {cache._tables.keys() ^ running} leak, or are missing"
    loads = {} if cache.saved is None else cache.saved.loads
    in_tables = sum(
        len(table.block_ids) + sum(map(len, table.tails)) for table in cache._tables.values()
    ) + sum(len(each.blocks) for each in loads.values())
    assert sum(pool._references) == in_tables, f"{sum(pool._references)} references, {in_tables} in tables"


def check_requests(client: LocalEngineClient, scheduler: Scheduler, num_taken: int) -> None:
    """Check that each unanswered request is in one place, and that the metrics count each ended one once."""
    metrics, num_active = scheduler._observed.metrics, scheduler.num_active
    num_ended = sum(metrics.end_to_end._counts) + sum(metrics.failed.values())
    assert num_ended + num_active == num_taken, (
        f"{num_ended} requests ended + {num_active} active != {num_taken} accepted"
    )
    if not _is_at_rest(client._lock, client._delivering) or client._refuses_all:
        return
    places = [*client._queue, *client._stopped_in_queue, *scheduler._groups]
    assert sorted(places) == sorted(client._targets), (
        f"requests {sorted(places)} are in progress, {sorted(client._targets)} are unanswered"
    )
    assert client._targets.keys() >= client._to_be_continued | client._with_receipt, (
        "an ended request is kept"
    )
    assert len(client._stop_signals) <= 1000, "stop signals are not polled"


def check_limits(scheduler: Scheduler) -> None:
    """Check that the waiting queue and the active requests are within the configured limits."""
    config, waiting = scheduler._config, scheduler._waiting
    assert config.max_num_requests < 0 or scheduler.num_active <= config.max_num_requests
    assert len(scheduler._running.sequences) <= scheduler._engine_limits.max_num_sequences
    if not config.max_queue_size:
        return
    most = config.max_queue_size + scheduler._engine_limits.max_num_sequences
    held = Counter[float]()
    for group in scheduler._admission.held.values():
        held[group.request.priority] += group.request.sampling.num_sequences
    for priority in {*waiting._levels, *held}:
        level = waiting._levels.get(priority)
        num_new = held[priority] + (0 if level is None else level.num_new)
        assert num_new <= most, f"{num_new} sequences of priority {priority:g} wait, at most {most}"


def _own_store(block_store: BlockStore | None) -> HostBlockStore | None:
    """Return the store of this rank's part of saved blocks."""
    if isinstance(block_store, (LeadersBlockStore, FollowersBlockStore)):
        block_store = block_store._store
    return block_store if isinstance(block_store, HostBlockStore) else None


def check_store(block_store: HostBlockStore) -> None:
    """Check that the block store's counts of blocks and bytes are right and within its limits."""
    if _is_at_rest(block_store._lock):
        sizes = [content.size for content in block_store._in_host.values()]
        _check_tier(block_store._host, sizes)
        assert block_store._host.num_bytes <= block_store._host.max_bytes
        largest = max(buffer.size for buffer in block_store._buffers.values())
        queued = sum(
            save.content.size for save in _items(block_store._saves) if isinstance(save, store._Save)
        )
        written = block_store._waiting_bytes - queued  # of the block that is being written
        assert 0 <= written <= largest, (
            f"{queued} bytes wait to be written, counted {block_store._waiting_bytes}"
        )
        assert block_store._waiting_bytes < store._MAX_QUEUED_BYTES + largest
    if block_store._files is not None:
        _check_files(block_store._files)


def _check_files(files: BlockFiles) -> None:
    if _is_at_rest(files._lock):
        sizes = [file.size for file in files._files.values()]
        _check_tier(files.counts, sizes)
        assert files.counts.num_bytes <= files.counts.max_bytes + max(sizes, default=0)


def _check_tier(counts: TierCounts, sizes: Sequence[int]) -> None:
    """Check that a tier holds what it has found and saved, and not dropped since."""
    counted = (counts.num_blocks, counts.num_bytes)
    assert counted == (len(sizes), sum(sizes)), (
        f"{counts.medium} holds {len(sizes)} blocks of {sum(sizes)} bytes, counted {counted}"
    )


def check_traffic(scheduler: Scheduler) -> None:
    """Check that the scheduler, the store and its tiers agree on what was saved and loaded."""
    saved = scheduler.kv_cache.saved
    assert saved is not None, "a store without an index"
    stats, tiers = saved.stats, saved.stats.tiers
    by_tier = sum(tier.num_loaded for tier in tiers)
    assert saved.num_loaded == stats.num_loaded == by_tier, (
        f"the scheduler counts {saved.num_loaded} loaded blocks, the store {stats.num_loaded}, "
        f"its tiers {by_tier}"
    )
    most = sum(tier.num_saved for tier in tiers)
    assert saved.num_saved <= stats.num_saved <= most, (
        f"the scheduler counts {saved.num_saved} saved blocks, the store {stats.num_saved}, its tiers {most}"
    )
    assert stats.loaded_bytes == stats.num_loaded * stats.block_bytes, "there are blocks of other sizes"


def check_adapters(cache: HostAdapterCache) -> None:
    """Check that the adapter cache's records agree with each other, and its limit."""
    if not _is_at_rest(cache._lock):
        return
    stored = [*cache._entries.values(), *cache._unloading]
    num_bytes = sum(entry.num_bytes for entry in stored)
    assert cache._num_bytes == num_bytes <= cache._max_bytes, (
        f"adapters have {num_bytes} bytes, counted {cache._num_bytes}, at most {cache._max_bytes}"
    )
    idle = sum(entry.num_bytes for entry in cache._idle.values())
    assert cache._idle_bytes == idle, f"idle adapters have {idle} bytes, counted {cache._idle_bytes}"
    users = Counter(map(id, cache._used.values()))
    assert users == Counter({id(entry): entry.users for entry in stored}), "users of adapters are miscounted"
    waiting = {each: key for key, load in cache._loads.items() for each in load.waiting}
    assert cache._waiting == waiting, "requests wait for adapters that nobody reads"
    queued = [key for key in _items(cache._jobs) if key is not None]
    assert cache._is_closed or len(cache._loads.keys() - set(queued)) <= 1, "adapters wait that nobody reads"
    weights = cache.waiting_weights
    if _is_at_rest(weights._lock):
        assert weights._num_bytes == sum(weights._sizes.values()), "waiting weights are miscounted"


# ---------------------------------------------------------------- when all threads wait


def check_waits(engine: RunningEngine) -> None:
    """Check that no thread of an engine waits although it has work. Called when no thread can run."""
    manager, client = engine._manager, engine.client
    if engine._adapters is not None:
        check_adapters(engine._adapters.cache)
    if engine._endpoint is not None:
        _check_connections(engine._endpoint)
    if not is_resting(manager):
        return
    assert not manager._work.is_set(), "the loop rests although it was woken"
    assert not (client._queue and manager._scheduler.room and not client._with_receipt), (
        "a new request waits, and the loop rests"
    )
    assert not client._stopped_in_queue, "a request that was stopped waits, and the loop rests"
    assert not (client._stop_signals or getattr(manager._inputs, "_stops", ())), (
        "a request is to stop, and the loop rests"
    )
    _check_obstacles(engine)


def is_resting(manager: GptManager) -> bool:
    """Whether an engine's loop waits for work."""
    return bool(_sleepers(manager._work)) and not manager._shutting_down


def _check_obstacles(engine: RunningEngine) -> None:
    """Check that each unanswered request waits for an adapter or for KV blocks that are being read."""
    manager, scheduler = engine._manager, engine._manager._scheduler
    saved, block_store = scheduler.kv_cache.saved, manager._block_store
    loads = {} if saved is None else saved.loads
    if (own := _own_store(block_store)) is not None:
        assert not own._ended, "KV blocks have been read, and the loop rests"
    if isinstance(block_store, LeadersBlockStore):
        assert not block_store._heard, "another rank has read KV blocks, and the loop rests"
    if isinstance(block_store, HostBlockStore):
        queued = [job for job in _items(block_store._loads) if job is not None]
        assert len(loads) - len(queued) <= 1, "KV blocks are awaited that nobody reads"
    held = scheduler._admission.held
    assert loads or len(held) == scheduler.num_active, "a request without an obstacle waits"
    if engine._adapters is None:
        return
    cache = engine._adapters.cache
    news = (*cache._events, *cache._stored, *cache._dropped)
    assert not news, "an adapter has been read or dropped, and the loop rests"
    awaiting = {request_id for request_id, group in held.items() if group.awaits_adapter}
    assert awaiting <= cache._waiting.keys(), "a request waits for an adapter that nobody reads"


def _check_connections(endpoint: EndpointServer) -> None:
    for connection in list(endpoint._connections):
        _check_delivery(connection._delivery)
        targets = getattr(connection._client, "_targets", {})
        if _is_at_rest(connection._lock):
            handled = {handle.request_id for handle in connection._handles.values()}
            assert handled <= targets.keys(), "a connection keeps requests that have been answered"


def _check_delivery(delivery: Delivery[Any]) -> None:
    assert not (delivery._waiting and _sleepers(delivery._changed)), (
        "responses wait, and so does their consumer"
    )
    further: dict[int, set[int]] = {}
    for request_id, index in delivery._waiting:
        if index:
            further.setdefault(request_id, set()).add(index)
    assert delivery._further == further, "waiting sequences are miscounted"
    assert all(delivery._waiting.values()), "an empty list of responses waits"


# ---------------------------------------------------------------- the machine's objects


def _is_at_rest(*locks: Any) -> bool:
    """Whether no thread holds one of these locks."""
    return all(lock.owner is None for lock in locks)


def _sleepers(waited_for: Any) -> Iterable[Fiber]:
    """Return the threads that wait for an event or a condition."""
    return waited_for._waiters._fibers


def _items(queue: Any) -> list[Any]:
    return list(queue._items)
