"""Check that the scheduler's private records agree with each other.

`check_integrity` takes a scheduler or one of its parts, and raises AssertionError if its records disagree.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import singledispatch
from itertools import chain
from typing import Any

from inflight.core.kv.block_pool import BlockHeap, BlockPool
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.core.request.llm_request import RequestState
from inflight.core.schedule import waiting_queue
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.core.schedule.running import Running, Slots
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.core.scheduler import Scheduler


@singledispatch
def check_integrity(part: Any) -> None:
    """Raise AssertionError unless the records of this part of the core agree."""
    raise TypeError(f"there is nothing to check about a {type(part).__name__}")


@check_integrity.register
def _(heap: BlockHeap) -> None:
    """Check that the heap has an entry for every block, in heap order."""
    entries = heap._entries
    assert len(entries) <= heap._most_entries, f"{len(entries)} entries, at most {heap._most_entries}"
    missing = {(key, block_id) for block_id, key in heap._key_of.items()}.difference(entries)
    assert not missing, f"blocks without an entry in the heap: {sorted(missing)}"
    in_order = all(entries[(place - 1) // 2] <= entries[place] for place in range(1, len(entries)))
    assert in_order, "the heap is out of order"


@check_integrity.register
def _(pool: BlockPool) -> None:
    """Check the states of blocks, the index, and that all cached blocks can be evicted."""
    held = {block_id for block_id, count in enumerate(pool._references) if count > 0}
    cached = {block_id for block_id in pool._contents if block_id not in held}
    empty = set(pool._empty)
    assert len(empty) == len(pool._empty), "a block is in the list of empty ones twice"
    assert len(held) + len(cached) + len(empty) == pool.num_blocks, (
        f"{len(held)} held + {len(cached)} cached + {len(empty)} empty != {pool.num_blocks} blocks"
    )
    assert not empty & (held | cached), "a held or cached block counts as empty"
    index = {content.digest: block_id for block_id, content in pool._contents.items()}
    assert pool._block_of == index, "the reuse index and the published blocks disagree"
    children: dict[bytes, set[bytes]] = {}
    for content in pool._contents.values():
        children.setdefault(content.parent, set()).add(content.digest)
    known = {parent: set(digests) for parent, digests in pool._children.items()}
    assert known == children, "the children and the published blocks disagree"
    _check_queues(pool, cached)


def _check_queues(pool: BlockPool, cached: set[int]) -> None:
    assert len(pool._cached) == len(cached), f"{len(pool._cached)} of {len(cached)} cached blocks are queued"
    for block_id in cached:
        content = pool._contents[block_id]
        key, is_leaf = pool._cached._key_of.get(block_id), content.digest not in pool._children
        wanted = (0, content.retention.priority, content.age) if is_leaf else (1, 0, content.age)
        assert key == wanted, f"cached block {block_id} is queued at {key}, its place is {wanted}"
    expiring = {b for b in cached if pool._contents[b].retention.duration_ms is not None}
    assert all(block_id in pool._expiries for block_id in expiring), (
        "a block with a retention duration is not queued for expiry"
    )
    assert len(pool._expiries) == len(expiring), (
        "a block is queued for expiry that is not cached or has no retention duration"
    )
    check_integrity(pool._cached)
    check_integrity(pool._expiries)


def check_references(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Check that the reference counts agree with `block_ids`, the entries of all block tables."""
    counts = [0] * pool.num_blocks
    for block_id in block_ids:
        counts[block_id] += 1
    assert counts == pool._references, "the block tables and the reference counts disagree"


@check_integrity.register
def _(cache: KvCacheManager) -> None:
    """Check that references and promises agree with the block tables, and that reservations add up."""
    check_integrity(cache.pool)
    tables = [part for table in cache._tables.values() for part in (table.block_ids, *table.tails)]
    loads = [] if cache.saved is None else list(cache.saved.loads.values())
    loading = [block for each in loads for block in each.blocks]
    check_references(cache.pool, chain([block.block_id for block in loading], *tables))
    reserved = sum(table.reserved for table in cache._tables.values())
    assert reserved == cache.num_reserved, f"reservations add up to {reserved}, not {cache.num_reserved}"
    assert cache.num_unreserved >= 0, f"{-cache.num_unreserved} blocks are reserved twice"
    promises = Counter(chain.from_iterable(table.promised for table in cache._tables.values()))
    promises.update(block.digest for block in loading)
    assert promises == cache._promises, (
        "the promised blocks and those that running sequences will compute disagree"
    )
    if cache.saved is not None:
        assert cache.saved._loading == {piece.key for each in loads for piece in each.pieces}
        assert cache.saved._found <= cache.saved._asked
    if cache.states is not None:
        check_integrity(cache.states)
        assert cache.states._saves.keys() == cache._tables.keys()
        assert cache.states._snapshot_of.keys() <= cache.pool._block_of.keys(), (
            "a snapshot outlived its block"
        )


@check_integrity.register
def _(states: StateSnapshots) -> None:
    """Check that every snapshot is either free, pending or findable, and that promises add up."""
    pending = [snapshot for saves in states._saves.values() for snapshot in saves.pending.values()]
    every = [*states._free, *states._snapshot_of.values(), *pending, *states._loading.values()]
    assert sorted(every) == list(range(states.num_snapshots))
    assert states._rolling.keys() <= states._snapshot_of.keys()
    assert states._superseded_by.keys() <= states._snapshot_of.keys()
    assert set(states._superseded_by.values()) <= states._saves.keys()
    promised = Counter(digest for saves in states._saves.values() for digest in saves.planned.values())
    promised.update(states._loading.keys())
    assert promised == states._promised


@check_integrity.register
def _(queue: WaitingQueue) -> None:
    """Check that sizes and the clients' accounts add up."""
    waiting = list(queue.in_order())
    assert len(waiting) == queue._size == len({r.key for r in waiting})
    assert queue._priorities == sorted(-priority for priority in queue._levels)
    assert all(queue._levels.values()), "an empty level was kept"
    assert queue._num_new == sum(level.num_new for level in queue._levels.values())
    assert len(queue._followed) <= waiting_queue._MAX_FOLLOWED
    assert all(level is queue._levels.get(priority) for priority, level in queue._followed.items())
    queued = Counter(c for level in queue._levels.values() for c, q in level.clients.items() for _ in q)
    assert all(account.num_present > 0 for account in queue._clients.values())
    assert queued == Counter({client: account.num_queued for client, account in queue._clients.items()})
    assert not queue._absent.keys() & queue._clients.keys()
    assert len(queue._absent) <= waiting_queue._MAX_ABSENT


@check_integrity.register
def _(slots: Slots) -> None:
    """Check that every slot is either free or taken."""
    assert len(slots.owners) + len(slots._free) == slots.count
    assert not set(slots._free) & set(slots.owners)


@check_integrity.register
def _(pages: AdapterPages) -> None:
    """Check that every page is free or has one adapter, and that unused adapters are idle or unloaded."""
    used = set(pages._used_by.values())
    residents = set(pages._residents.values())
    owned = [page for resident in used | residents for page in resident.pages]
    assert sorted(owned + pages._free) == list(range(pages._limits.num_adapter_pages))
    assert Counter(map(id, pages._used_by.values())) == Counter({id(r): r.num_users for r in used})
    assert residents - used == set(pages._idle.values())
    assert all(resident.is_void == (resident not in residents) for resident in used | residents)
    assert pages._num_idle_pages == sum(len(resident.pages) for resident in pages._idle.values())


@check_integrity.register
def _(running: Running) -> None:
    """Check that the sequences and the slots agree."""
    check_integrity(running.slots)
    check_integrity(running.adapter_pages)
    users = {r.key: r.group.adapter.handle for r in running.sequences if r.group.adapter is not None}
    held = running.adapter_pages._used_by
    assert users == {key: resident.handle for key, resident in held.items()}
    assert {slot for r in running.sequences for slot in r.slots} == set(running.slots.owners)


@check_integrity.register
def _(scheduler: Scheduler) -> None:
    """Check that slots, queues and blocks agree with the requests' states."""
    check_integrity(scheduler.kv_cache)
    check_integrity(scheduler._waiting)
    sequences = [sequence for group in scheduler._groups.values() for sequence in group.sequences]
    assert all(sequence.state is not RequestState.WAITING or not sequence.slots for sequence in sequences)
    running = {sequence.key for sequence in sequences if sequence.slots}
    assert running == {sequence.key for sequence in scheduler._running.sequences}
    check_integrity(scheduler._running)
