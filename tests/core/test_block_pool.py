"""Exact block ids and eviction orders of the pool, its heap, and faults that its check detects."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from inflight.core.kv.block_pool import BlockHeap, BlockPool
from inflight.core.kv.retention import Retention
from inflight.testing.simulation.integrity import check_integrity

MS = 1_000_000


def make_tree(num_blocks: int, **parents: str) -> tuple[BlockPool, dict[str, int]]:
    """A pool with one held block for each name, published under its name and its parent's as digests."""
    pool = BlockPool(num_blocks)
    blocks = dict(zip(parents, pool.take(len(parents))))
    for name, parent in parents.items():
        pool.publish(blocks[name], name.encode(), parent.encode())
    return pool, blocks


def release(pool: BlockPool, blocks: dict[str, int], names: str) -> None:
    pool.release(blocks[name] for name in names)


def evicted(pool: BlockPool, blocks: dict[str, int], count: int) -> str:
    """Take `count` blocks one by one; return the names of their former contents."""
    names = {block_id: name for name, block_id in blocks.items()}
    taken = []
    for _ in range(count):
        taken += pool.take(1)
        check_integrity(pool)
    return "".join(names[block_id] for block_id in taken)


# ---------------------------------------------------------------------- references


def test_blocks_are_taken_in_order_and_counted():
    pool = BlockPool(4)
    assert pool.take(2) == (0, 1)
    assert (pool.num_free, pool.num_held) == (2, 2)
    check_integrity(pool)


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(1)
    (block_id,) = pool.take(1)
    pool.share((block_id,))
    pool.release((block_id,))
    assert pool.num_free == 0
    pool.release((block_id,))
    assert pool.num_free == 1


def test_sharing_a_cached_block_takes_it_out_of_the_free_ones():
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.publish(block_id, b"a", b"")
    pool.release((block_id,))
    pool.share((block_id,))
    assert pool.take(1) != (block_id,)
    assert pool.num_free == 0
    check_integrity(pool)


def test_the_first_of_two_blocks_with_one_digest_is_found():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"a", b"")
    pool.publish(second, b"a", b"")
    assert pool.find(b"a") == first
    pool.release((second,))
    assert pool.find(b"a") == first
    assert (pool.num_cached, pool.num_empty) == (0, 1)
    check_integrity(pool)


def test_held_shared_cached_and_empty_blocks_are_counted():
    pool, blocks = make_tree(6, a="", b="a")
    (worthless,) = pool.take(1)
    pool.share((blocks["a"], worthless))
    release(pool, blocks, "b")
    counts = pool.num_held, pool.num_shared, pool.num_cached, pool.num_empty, pool.num_free
    assert counts == (2, 2, 1, 3, 4)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.take(3),
        lambda pool: pool.release((0,)),
        lambda pool: pool.share((0,)),
        lambda pool: pool.publish(0, b"a", b""),
        lambda pool: [pool.publish(pool.take(1)[0], b"a", b""), pool.publish(0, b"b", b"")],
    ],
)
def test_misuse_of_the_block_pool_raises_assertion_errors(misuse):
    with pytest.raises(AssertionError):
        misuse(BlockPool(2))


# ---------------------------------------------------------------------- the order of eviction


def test_blocks_without_content_are_taken_before_cached_ones():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first, b"a", b"")
    pool.retain(first, Retention(0))
    pool.release((first, second))
    assert pool.take(3) == (second, 2, 3)
    assert pool.find(b"a") == first


def test_cached_blocks_are_evicted_least_recently_released_first():
    pool, blocks = make_tree(3, a="", b="", c="")
    release(pool, blocks, "bac")
    assert evicted(pool, blocks, 1) == "b"
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks["a"]
    pool.share((blocks["a"],))
    release(pool, blocks, "a")
    assert evicted(pool, blocks, 2) == "ca"


def test_lower_priorities_are_evicted_first_and_within_one_the_least_recent():
    pool, blocks = make_tree(5, a="", b="", c="", d="", e="")
    for name, priority in (("a", 80), ("b", 10), ("d", 80), ("e", 36)):
        pool.retain(blocks[name], Retention(priority))
    release(pool, blocks, "abcde")
    assert evicted(pool, blocks, 5) == "bcead"


def test_leaves_are_evicted_before_their_parents_whatever_was_released_first():
    pool, blocks = make_tree(4, a="", b="a", c="b", x="")
    release(pool, blocks, "abxc")
    # b and a are older than x, but are parents of c until it is evicted.
    assert evicted(pool, blocks, 4) == "xcba"


def test_a_parent_that_becomes_a_leaf_is_evicted_by_its_own_priority_and_release():
    pool, blocks = make_tree(5, a="", b="a", x="", y="", z="")
    pool.retain(blocks["b"], Retention(0))
    pool.retain(blocks["z"], Retention(10))
    release(pool, blocks, "xaybz")
    assert evicted(pool, blocks, 5) == "bzxay"


def test_a_child_of_high_priority_protects_its_parents():
    pool, blocks = make_tree(5, a="", b="a", c="b", x="", y="x")
    pool.retain(blocks["c"], Retention(90))
    pool.retain(blocks["a"], Retention(0))
    release(pool, blocks, "cbayx")
    assert evicted(pool, blocks, 5) == "yxcba"


def test_a_parent_becomes_a_leaf_when_its_last_child_is_evicted():
    pool, blocks = make_tree(4, a="", b="a", c="a", x="")
    release(pool, blocks, "abxc")
    assert evicted(pool, blocks, 4) == "bxca"


def make_duplicate_producer() -> tuple[BlockPool, dict[str, int]]:
    """A second sequence computed a again, as block A, and holds its child b.

    A and its parent p are released.
    """
    pool = BlockPool(6)
    blocks = dict(zip("paAbq", pool.take(5)))
    pool.publish(blocks["p"], b"p", b"")
    pool.publish(blocks["a"], b"a", b"p")
    pool.publish(blocks["A"], b"a", b"p")
    pool.publish(blocks["b"], b"b", b"a")
    release(pool, blocks, "pa")
    check_integrity(pool)
    return pool, blocks


def test_if_no_free_block_is_a_leaf_the_first_released_is_evicted():
    pool, blocks = make_duplicate_producer()
    pool.retain(blocks["p"], Retention(90))  # without a leaf the order of release decides
    pool.take(1)  # the block without content
    assert pool.num_cached == pool.num_free == 2
    assert evicted(pool, blocks, 2) == "pa"


def test_a_leaf_is_evicted_before_blocks_whose_children_are_held():
    pool, blocks = make_duplicate_producer()
    pool.publish(blocks["q"], b"q", b"")
    pool.retain(blocks["q"], Retention(100))
    release(pool, blocks, "q")
    pool.take(1)
    assert evicted(pool, blocks, 1) == "q"


def test_a_parent_computed_again_is_evicted_after_its_child():
    pool, blocks = make_duplicate_producer()
    pool.take(1)
    assert evicted(pool, blocks, 2) == "pa"
    release(pool, blocks, "A")
    assert pool.num_empty == 1  # A was a second copy, so it becomes empty
    (blocks["a2"],) = pool.take(1)
    pool.publish(blocks["a2"], b"a", b"p")  # computed again, by yet another block
    pool.publish(blocks["q"], b"q", b"")
    release(pool, {"a": blocks["a2"], "q": blocks["q"], "b": blocks["b"]}, "aqb")
    blocks.pop("a")
    assert [pool.take(1)[0] for _ in range(3)] == [blocks["q"], blocks["b"], blocks["a2"]]
    check_integrity(pool)


def test_a_cached_block_that_gets_a_child_is_evicted_after_it():
    pool, blocks = make_tree(3, a="", x="")
    release(pool, blocks, "ax")
    (blocks["b"],) = pool.take(1)
    pool.publish(blocks["b"], b"b", b"a")
    check_integrity(pool)
    release(pool, blocks, "b")
    assert evicted(pool, blocks, 3) == "xba"


# ---------------------------------------------------------------------- durations


def test_a_timed_priority_expires_after_the_block_was_unreferenced_for_its_duration():
    pool, blocks = make_tree(3, a="", b="", c="")
    pool.expire(5 * MS)
    pool.retain(blocks["a"], Retention(90, duration_ms=10))
    pool.retain(blocks["b"], Retention(90))
    pool.expire(50 * MS)  # held all the time: nothing runs
    release(pool, blocks, "abc")
    pool.expire(60 * MS - 1)
    assert evicted(pool, blocks, 1) == "c"
    pool.expire(60 * MS)
    assert evicted(pool, blocks, 2) == "ab"


def test_blocks_whose_priorities_expired_are_evicted_in_the_order_of_release():
    pool, blocks = make_tree(4, a="", b="", c="", d="")
    pool.retain(blocks["b"], Retention(90, duration_ms=1))
    pool.retain(blocks["c"], Retention(0, duration_ms=1))  # a low priority ends as well
    release(pool, blocks, "abcd")
    pool.expire(MS)
    assert evicted(pool, blocks, 4) == "abcd"


def test_a_duration_starts_again_with_the_next_release():
    pool, blocks = make_tree(2, a="", b="")
    pool.retain(blocks["a"], Retention(90, duration_ms=10))
    release(pool, blocks, "ab")
    pool.expire(9 * MS)
    pool.share((blocks["a"],))
    pool.expire(30 * MS)
    release(pool, blocks, "a")
    pool.expire(39 * MS)
    check_integrity(pool)
    assert evicted(pool, blocks, 2) == "ba"


def test_an_expired_priority_stays_expired():
    pool, blocks = make_tree(2, a="", b="")
    pool.retain(blocks["a"], Retention(90, duration_ms=10))
    release(pool, blocks, "ab")
    pool.expire(10 * MS)
    pool.share((blocks["a"],))
    pool.expire(11 * MS)
    release(pool, blocks, "a")
    pool.share((blocks["b"],))
    release(pool, blocks, "b")
    assert evicted(pool, blocks, 2) == "ab"


def test_a_parent_whose_priority_expired_is_evicted_after_its_child():
    pool, blocks = make_tree(3, a="", b="a", x="")
    pool.retain(blocks["a"], Retention(90, duration_ms=1))
    pool.retain(blocks["b"], Retention(50))
    release(pool, blocks, "bax")
    pool.expire(MS)
    assert evicted(pool, blocks, 3) == "xba"


def test_an_evicted_blocks_duration_does_not_apply_to_its_next_content():
    pool, blocks = make_tree(2, a="", b="")
    pool.retain(blocks["a"], Retention(0, duration_ms=10))
    release(pool, blocks, "ab")
    assert evicted(pool, blocks, 1) == "a"
    pool.publish(blocks["a"], b"c", b"", Retention(90))
    pool.expire(20 * MS)
    release(pool, blocks, "a")
    pool.expire(40 * MS)
    assert evicted(pool, blocks, 2) == "ba"


def test_the_retention_of_a_second_producer_applies_to_the_cached_block():
    pool, blocks = make_tree(4, a="", b="", c="")
    (again,) = pool.take(1)
    release(pool, blocks, "abc")
    pool.expire(5 * MS)
    pool.publish(again, b"a", b"", Retention(90, duration_ms=10))
    check_integrity(pool)
    pool.expire(15 * MS - 1)
    assert evicted(pool, blocks, 1) == "b"
    pool.publish(again, b"c", b"")  # no retention: nothing changes
    pool.expire(15 * MS)
    assert evicted(pool, blocks, 2) == "ac"


# ---------------------------------------------------------------------- the heap


def test_the_heap_agrees_with_sorting_and_never_grows_beyond_twice_its_blocks():
    heap, keys, random = BlockHeap(20), {}, Random(7)
    for _ in range(5000):
        block_id, action = random.randrange(20), random.random()
        if action < 0.6:
            keys[block_id] = (random.randrange(4), random.randrange(1000))
            heap.put(block_id, keys[block_id])
        elif action < 0.8:
            keys.pop(block_id, None)
            heap.discard(block_id)
        elif keys:
            smallest = min(keys.values())
            assert heap.first_key() == smallest
            assert keys.pop(heap.pop()) == smallest
        assert len(heap) == len(keys) and len(heap._entries) <= 40
        check_integrity(heap)


def test_blocks_that_are_shared_repeatedly_do_not_grow_the_heap():
    pool, blocks = make_tree(8, a="", b="a", c="b")
    for name in blocks:
        pool.retain(blocks[name], Retention(50, duration_ms=1000))
    release(pool, blocks, "cba")
    for _ in range(1000):
        pool.share(blocks.values())
        release(pool, blocks, "cba")
    check_integrity(pool)
    assert len(pool._cached._entries) <= 16 and len(pool._expiries._entries) <= 16


# ---------------------------------------------------------------------- the integrity check


def _lose_a_block(pool: BlockPool) -> None:
    pool._empty.pop()


def _count_a_block_twice(pool: BlockPool) -> None:
    pool._empty.append(pool._empty[0])


def _count_a_held_block_as_empty(pool: BlockPool) -> None:
    pool._empty[0] = 0


def _forget_a_child(pool: BlockPool) -> None:
    del pool._children[b"a"]


def _keep_a_child_that_is_gone(pool: BlockPool) -> None:
    pool._children[b"c"] = {b"d": None}


def _queue_a_leaf_behind(pool: BlockPool) -> None:
    pool._cached.put(2, (1, 0, 1))


def _leave_a_leaf_out(pool: BlockPool) -> None:
    pool._cached.discard(2)


def _lose_a_leafs_entry(pool: BlockPool) -> None:
    pool._cached._entries.clear()


def _find_a_block_by_another_digest(pool: BlockPool) -> None:
    pool._block_of[b"d"] = pool._block_of.pop(b"c")


def _never_expire(pool: BlockPool) -> None:
    pool._expiries.discard(2)


def _expire_what_is_held(pool: BlockPool) -> None:
    pool._expiries.put(0, (1,))


@pytest.mark.parametrize(
    "plant",
    [
        _lose_a_block,
        _count_a_block_twice,
        _count_a_held_block_as_empty,
        _forget_a_child,
        _keep_a_child_that_is_gone,
        _queue_a_leaf_behind,
        _leave_a_leaf_out,
        _lose_a_leafs_entry,
        _find_a_block_by_another_digest,
        _never_expire,
        _expire_what_is_held,
    ],
)
def test_check_integrity_detects_a_planted_fault(plant: Callable[[BlockPool], None]):
    pool, blocks = make_tree(6, a="", b="a", c="b")
    pool.retain(blocks["c"], Retention(50, duration_ms=5))
    release(pool, blocks, "c")
    check_integrity(pool)
    plant(pool)
    with pytest.raises(AssertionError):
        check_integrity(pool)
