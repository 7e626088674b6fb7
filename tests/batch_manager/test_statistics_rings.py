"""Rings keep the last statistics, and return each once."""

from __future__ import annotations

import threading
from dataclasses import replace

from inflight.batch_manager.statistics_rings import StatisticsRings
from inflight.core.kv.store_stats import HOST, StoreStats, TierStats
from inflight.core.report.stats import (
    IterationCounts,
    KvChanges,
    MemoryUsage,
    RequestCounts,
    RequestStage,
)
from inflight.executor_stats import iteration_stats


def stats(iteration: int) -> IterationCounts:
    return IterationCounts(iteration, 1, 8, 64, 60, 16, 1, 1, 0, 5, 0, 0, 0, 0, 0)


def request(request_id: int) -> RequestCounts:
    return RequestCounts(request_id, 0, RequestStage.QUEUED, 0, 0, 0, False, False, 0, 0, 0)


def numbers(kept) -> list[int]:
    return [one.stats.iteration for one in kept]


def test_latest_returns_the_statistics_since_the_last_call():
    rings = StatisticsRings(3)
    assert rings.latest() == []
    rings.add(stats(0))
    rings.add(stats(1))
    assert numbers(rings.latest()) == [0, 1]
    assert rings.latest() == []
    rings.add(stats(2))
    assert numbers(rings.latest()) == [2]


def test_a_full_ring_drops_the_oldest_statistics():
    rings = StatisticsRings(3)
    for iteration in range(5):
        rings.add(stats(iteration))
    assert numbers(rings.latest()) == [2, 3, 4]


def test_changes_of_kept_iterations_add_up_to_the_counts_since_the_start():
    rings = StatisticsRings(2)
    totals = [(3, 1, 4), (3, 1, 4), (9, 2, 7)]  # the second iteration changes nothing
    for taken, reused, dropped in totals:
        tiers = (TierStats(HOST, num_dropped=dropped),)
        store = StoreStats(64, num_saved=taken, num_loaded=reused, tiers=tiers)
        rings.add(replace(stats(0), num_taken_blocks=taken, num_reused_blocks=reused, block_store=store))
    second, third = (one.kv for one in rings.latest())
    assert second == KvChanges()
    assert third == KvChanges(num_taken=6, num_reused=1, num_offloaded=6, num_onboarded=1, num_host_dropped=3)


def test_peeking_removes_nothing_and_includes_fetched_statistics():
    rings = StatisticsRings(3)
    for iteration in range(5):
        rings.add(stats(iteration))
    assert numbers(rings.peek(2)) == [3, 4]
    assert numbers(rings.latest()) == [2, 3, 4]
    assert numbers(rings.peek(9)) == [2, 3, 4] and rings.peek(0) == []


def test_request_statistics_are_kept_only_if_configured():
    without, with_requests = StatisticsRings(3), StatisticsRings(3, 2)
    assert without.is_on and not without.wants_requests and with_requests.wants_requests
    for rings in (without, with_requests):
        for iteration in range(3):
            rings.add(stats(iteration), (request(iteration), request(10)))
    assert without.latest_requests() == []
    assert [one.iteration for one in with_requests.peek_requests(1)] == [2]
    kept = with_requests.latest_requests()
    assert [(one.iteration, [r.request_id for r in one.request_stats]) for one in kept] == [
        (1, [1, 10]),
        (2, [2, 10]),
    ]
    assert with_requests.latest_requests() == [] and numbers(with_requests.latest()) == [0, 1, 2]


def test_rings_of_size_zero_keep_no_statistics():
    rings = StatisticsRings(0)
    assert not rings.is_on
    rings.add(stats(1))
    assert rings.latest() == [] and rings.peek(5) == []
    assert StatisticsRings(0, 5).is_on


def test_json_has_the_time_of_the_iteration():
    clock = iter([1.5, 2.5])
    rings = StatisticsRings(3, clock_s=lambda: next(clock))
    rings.add(stats(7))
    rings.add(stats(8))
    first, second = (iteration_stats(kept, MemoryUsage()).to_plain() for kept in rings.peek(5))
    assert (first["iter"], second["iter"]) == (7, 8)
    assert first["timestamp"].endswith("01.500000") and second["timestamp"].endswith("02.500000")


def test_a_reader_beside_the_loop_sees_each_iteration_once():
    rings = StatisticsRings(5000)
    seen: list[int] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.extend(numbers(rings.latest()))

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in range(5000):
        rings.add(stats(iteration))
    ended.set()
    reader.join()
    assert seen + numbers(rings.latest()) == list(range(5000))
