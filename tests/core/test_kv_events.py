"""Events of the KV cache: stored and evicted blocks, and changes of their retention."""

from __future__ import annotations

from inflight.config import SchedulingConfig
from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules, block_digest
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.kv_events import KvEvent, KvEventLog, StoredBlock, block_hash
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.scheduler import Scheduler
from tests.core.factories import make_limits

SIZE = 4
SHARED = CacheRules(ROOT_SCOPE)


def make_cache(num_blocks: int = 4, max_events: int = 100) -> KvCacheManager:
    cache = KvCacheManager(num_blocks, SIZE, KvEventLog(max_events))
    assert cache.events is not None
    assert cache.events.take() == [KvEvent(0, num_blocks=num_blocks)]
    return cache


def run_to_end(cache: KvCacheManager, key: int, tokens: list[int], rules: CacheRules = SHARED) -> None:
    """Compute a new sequence and release it."""
    cache.admit(
        key, cache.match_prefix(key, tokens, rules), cache.blocks_for(len(tokens)), rules, len(tokens)
    )
    cache.extend(key, len(tokens))
    cache.publish(key, tokens, len(tokens))
    cache.release(key)


def hashes(*blocks: list[int]) -> list[int]:
    parent, found = ROOT_SCOPE, []
    for block in blocks:
        parent = block_digest(parent, block)
        found.append(block_hash(parent))
    return found


def taken(cache: KvCacheManager) -> list[KvEvent]:
    assert cache.events is not None
    return cache.events.take()


def test_blocks_of_one_sequence_are_one_event() -> None:
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    first, second = hashes([0, 1, 2, 3], [4, 5, 6, 7])
    none = (0, 0, 0, 0)
    assert taken(cache) == [
        KvEvent(
            1,
            stored=(
                StoredBlock(first, (0, 1, 2, 3), none, None, 35),
                StoredBlock(second, (4, 5, 6, 7), none, None, 35),
            ),
        )
    ]


def test_a_stored_block_names_its_known_parent() -> None:
    cache = make_cache()
    run_to_end(cache, 1, list(range(5)))
    taken(cache)
    run_to_end(cache, 2, list(range(9)))
    (event,) = taken(cache)
    first, second = hashes([0, 1, 2, 3], [4, 5, 6, 7])
    assert event.parent_hash == first
    assert [block.block_hash for block in event.stored] == [second]


def test_blocks_that_are_stored_already_make_no_event() -> None:
    cache = make_cache()
    run_to_end(cache, 1, list(range(5)))
    taken(cache)
    run_to_end(cache, 2, list(range(5)))
    assert taken(cache) == []


def test_evicted_blocks_are_one_event_before_that_of_the_new_blocks() -> None:
    cache = make_cache(num_blocks=3)
    run_to_end(cache, 1, list(range(9)))
    taken(cache)
    run_to_end(cache, 2, list(range(20, 29)))
    removed, stored = taken(cache)
    first, second = hashes([0, 1, 2, 3], [4, 5, 6, 7])
    assert removed.removed == (second, first), "leaves go first"
    assert [block.token_ids for block in stored.stored] == [(20, 21, 22, 23), (24, 25, 26, 27)]
    assert [removed.event_id, stored.event_id] == [2, 3]


def test_a_changed_priority_is_an_event() -> None:
    cache = make_cache()
    run_to_end(cache, 1, list(range(5)))
    taken(cache)
    important = RetentionConfig((TokenRangeRetention(0, None, Retention(80, duration_ms=5)),))
    run_to_end(cache, 2, list(range(5)), CacheRules(ROOT_SCOPE, retention=important, prompt_length=5))
    (block,) = hashes([0, 1, 2, 3])
    assert taken(cache) == [KvEvent(2, updated=block, priorities=(35, 80))]
    cache.pool.expire(6_000_000)
    assert taken(cache) == [KvEvent(3, updated=block, priorities=(80, 35))]


def test_events_have_extra_ids_and_the_adapter() -> None:
    cache = make_cache()
    rules = CacheRules(ROOT_SCOPE, extra_ids=(0, 7, 7, 0, 0), prompt_length=5, lora_task_id=9)
    run_to_end(cache, 1, list(range(5)), rules)
    (event,) = taken(cache)
    assert (event.stored[0].extra_ids, event.stored[0].lora_task_id) == ((0, 7, 7, 0), 9)


def test_the_oldest_of_too_many_events_are_dropped() -> None:
    cache = make_cache(max_events=2)
    for key in range(4):
        run_to_end(cache, key, list(range(100 * key, 100 * key + 9)))
    assert [event.event_id for event in taken(cache)][-1] > 2
    assert taken(cache) == []


def test_clearing_a_cache_reports_its_blocks_as_removed() -> None:
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    taken(cache)
    cache.clear()
    assert [sorted(event.removed) for event in taken(cache)] == [sorted(hashes([0, 1, 2, 3], [4, 5, 6, 7]))]


def test_a_scheduler_makes_events_only_if_a_buffer_is_configured() -> None:
    assert Scheduler(SchedulingConfig(), make_limits()).take_kv_events() == []
    kept = Scheduler(SchedulingConfig(kv_event_buffer_size=8), make_limits()).take_kv_events()
    assert [event.num_blocks for event in kept] == [make_limits().num_blocks]
