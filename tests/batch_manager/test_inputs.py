"""Inputs of an iteration when requests bring adapters."""

from __future__ import annotations

from dataclasses import replace

from inflight.batch_manager.inputs import OwnInputs
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from tests.core.factories import make_request, make_scheduler


class Cache:
    """A fake adapter cache that records requests."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, LoraRequest]] = []

    def submit(self, request_id: int, lora: LoraRequest) -> None:
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
