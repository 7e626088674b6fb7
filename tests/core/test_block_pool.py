"""Exact block ids and orders of the pool."""

from __future__ import annotations

import pytest

from inflight.core.block_pool import BlockPool


def test_blocks_are_taken_in_order_and_counted():
    pool = BlockPool(4)
    assert pool.take(2) == (0, 1)
    assert (pool.num_free, pool.num_held) == (2, 2)
    pool.check_integrity()


def test_worthless_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first, b"a")
    pool.release((first, second))
    assert pool.take(3) == (second, 2, 3)
    assert pool.find(b"a") == first


def test_cached_blocks_are_evicted_least_recently_released_first():
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block_id, digest in zip(blocks, (b"a", b"b", b"c")):
        pool.publish(block_id, digest)
    pool.release((blocks[1], blocks[0], blocks[2]))
    assert pool.take(1) == (blocks[1],)
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(1)
    (block_id,) = pool.take(1)
    pool.share((block_id,))
    pool.release((block_id,))
    assert pool.num_free == 0
    pool.release((block_id,))
    assert pool.num_free == 1


def test_sharing_a_cached_block_takes_it_out_of_the_free_list():
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.publish(block_id, b"a")
    pool.release((block_id,))
    pool.share((block_id,))
    assert pool.take(1) != (block_id,)
    pool.check_integrity()


def test_the_first_block_of_a_digest_stays_the_one_found():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.release((second,))
    assert pool.find(b"a") == first


@pytest.mark.parametrize("misuse", [lambda pool: pool.take(3), lambda pool: pool.release((0,))])
def test_broken_promises_are_assertions(misuse):
    with pytest.raises(AssertionError):
        misuse(BlockPool(2))
