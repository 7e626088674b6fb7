"""Allocation of the device's adapter pages: loads, evictions and claims."""

from __future__ import annotations

import random

import pytest

from inflight.core.report.metrics import adapter_stats
from inflight.core.request.adapter import StoredAdapter
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.errors import InvalidArgument
from inflight.testing.simulation.integrity import check_integrity
from inflight.testing.small_inputs import make_adapter
from tests.core.factories import make_limits


def make_pages(count: int) -> AdapterPages:
    """Adapter memory of `num_pages` pages of 8 ranks."""
    return AdapterPages(make_limits(num_adapter_pages=count))


def loads(pages: AdapterPages) -> list[tuple[int, tuple[int, ...]]]:
    check_integrity(pages)
    return [(load.adapter.handle, load.pages) for load in pages.collect_loads()]


ONE, TWO, THREE = (make_adapter(handle) for handle in (1, 2, 3))
WIDE = make_adapter(4, rank=17)


def test_an_adapter_is_loaded_once_for_all_its_requests():
    pages = make_pages(4)
    for key in (7, 8):
        pages.acquire(key, ONE)
    pages.acquire(9, make_adapter(5, rank=9))
    assert loads(pages) == [(1, (0,)), (5, (1, 2))]
    assert [pages.first_page(key) for key in (7, 8, 9, 10)] == [0, 0, 1, -1]
    pages.release(7)
    pages.release(8)
    pages.release(10)
    pages.acquire(11, ONE)
    assert loads(pages) == [] and pages.first_page(11) == 0
    stats = adapter_stats(6, pages)
    assert (stats.num_stored, stats.num_resident, stats.num_pages, stats.num_used_pages) == (6, 2, 4, 3)
    assert (stats.num_loads, stats.num_evictions) == (2, 0)


def test_the_longest_idle_adapter_is_evicted_and_adapters_in_use_stay():
    pages = make_pages(3)
    for key, adapter in ((1, ONE), (2, TWO), (3, THREE)):
        pages.acquire(key, adapter)
    assert loads(pages) == [(1, (0,)), (2, (1,)), (3, (2,))]
    other = make_adapter(5)
    assert not pages.may_start(other, None)
    pages.release(2)
    pages.release(1)
    assert pages.num_free == 2 and pages.may_start(other, None) and not pages.may_start(WIDE, None)
    pages.acquire(4, other)
    assert loads(pages) == [(5, (1,))], "the second has been idle for longer than the first"
    assert pages.may_start(ONE, None) and pages.num_evictions == 1
    pages.acquire(5, ONE)
    assert loads(pages) == [] and not pages.may_start(TWO, None)


def test_an_adapter_larger_than_all_pages_is_refused():
    pages = make_pages(3)
    pages.check_fits(make_adapter(rank=24))
    with pytest.raises(InvalidArgument, match="rank 25 does not fit: the device has room for rank 24"):
        pages.check_fits(make_adapter(rank=25))
    with pytest.raises(InvalidArgument, match="rank 65 does not fit: the device has room for rank 64"):
        make_pages(100).check_fits(make_adapter(rank=65))


def test_a_claim_blocks_pages_idle_adapters_and_adapters_about_to_be_evicted():
    pages = make_pages(4)
    for key, adapter in ((1, ONE), (2, TWO), (3, THREE)):
        pages.acquire(key, adapter)
    pages.acquire(4, ONE)
    pages.release(3)
    claimed = pages.claim(WIDE)
    assert claimed == {3, 1}, "a free page, an idle one, and the oldest in use"
    assert [pages.may_start(each, claimed) for each in (ONE, TWO, THREE, make_adapter(9))] == [
        False,
        True,
        False,
        False,
    ]
    pages.acquire(5, TWO)
    assert pages.claim(WIDE) == claimed, "whoever else begins to use another one"


def test_a_forgotten_adapter_is_loaded_again_and_its_pages_stay_while_in_use():
    pages = make_pages(2)
    pages.acquire(1, ONE)
    pages.forget([1, 77])
    pages.acquire(2, ONE)
    assert loads(pages) == [(1, (0,)), (1, (1,))]
    assert [pages.first_page(key) for key in (1, 2)] == [0, 1]
    pages.release(1)
    pages.acquire(3, TWO)
    assert loads(pages) == [(2, (0,))]
    pages.release(2)
    pages.forget([1])
    assert pages.num_free == 1 and loads(pages) == []


@pytest.mark.parametrize("seed", range(50))
def test_no_page_in_use_is_reassigned(seed: int):
    """Use adapters at random, and record the content of each page as on the device."""
    rng, num_pages = random.Random(seed), 9
    pages = make_pages(num_pages)
    adapters = [make_adapter(handle, rank=rng.choice([1, 8, 9, 24, 40])) for handle in range(12)]
    held: list[int | None] = [None] * num_pages
    running: dict[int, tuple[StoredAdapter, tuple[int, ...]]] = {}
    where: dict[int, tuple[int, ...]] = {}
    for key in range(300):
        adapter = rng.choice(adapters)
        while not pages.may_start(adapter, None):
            left = rng.choice(list(running))
            del running[left]
            pages.release(left)
        pages.acquire(key, adapter)
        for load in pages.collect_loads():
            where[load.adapter.handle] = load.pages
            for page in load.pages:
                held[page] = load.adapter.handle
        running[key] = adapter, where[adapter.handle]
        if rng.random() < 0.1:
            pages.forget([rng.choice(adapters).handle])
        for other, (its, its_pages) in running.items():
            assert [held[page] for page in its_pages] == [its.handle] * len(its_pages)
            assert pages.first_page(other) == its_pages[0]
        check_integrity(pages)
    assert pages.num_evictions > 20
