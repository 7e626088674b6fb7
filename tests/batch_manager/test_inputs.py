"""Inputs of an iteration when requests bring adapters, and when saved KV blocks change."""

from __future__ import annotations

from dataclasses import replace

from inflight.batch_manager.inputs import OwnInputs
from inflight.core.kv.block_store import StoreUpdate
from inflight.core.kv.store_stats import StoreStats
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.core.request.request import Origin
from tests.batch_manager.ranks_in_memory import make_ranks
from tests.core.factories import make_request, make_scheduler


class Cache:
    """A fake adapter cache that records requests."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, LoraRequest]] = []

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        self.submitted.append((request_id, lora))

    def update(self) -> AdapterUpdate:
        return AdapterUpdate()

    def forget(self, request_id: int) -> None:
        raise AssertionError("nobody has ended")


def test_only_the_first_of_new_requests_with_one_id_asks_for_its_adapter() -> None:
    """The scheduler refuses the others, whose adapters must not replace that of the first."""
    first = make_request(request_id=1, lora=LoraRequest(task_id=5))
    second = replace(first, lora=LoraRequest(task_id=6))
    cache, scheduler = Cache(), make_scheduler(num_adapter_pages=4)
    inputs = OwnInputs(scheduler, lambda room: [first, second], None, lambda: 0, None, None, cache)
    assert inputs.next().new_requests == (first, second)
    assert cache.submitted == [(1, first.lora)]


class Store:
    """A fake block store whose updates the test gives."""

    def __init__(self, *news: StoreUpdate) -> None:
        self._news = list(news)

    def update(self) -> StoreUpdate:
        return self._news.pop(0)


def test_other_ranks_get_changes_of_saved_blocks_without_requests() -> None:
    saved = StoreUpdate(saved=(b"a" * 16,), stats=StoreStats(64, 1, 64))
    leader, follower = make_ranks(2)
    store = Store(StoreUpdate(), saved, StoreUpdate(stats=StoreStats(64, 2, 128)))
    inputs = OwnInputs(make_scheduler(), lambda room: [], None, lambda: 0, leader, block_store=store)
    for _ in range(3):
        inputs.next()
    assert follower.num_unheard == 1, "statistics alone are not shared"
    shared = follower.follow(is_asleep=True)
    assert shared is not None and shared.blocks == saved
