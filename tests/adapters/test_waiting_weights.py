"""The limit of waiting weights, and the events after which weights no longer count."""

from __future__ import annotations

import pytest

from inflight.adapters.commands import AdapterCommands
from inflight.adapters.sources import AdapterFolders
from inflight.core.request.adapter import LoraRequest
from inflight.errors import Unavailable

from .caching import UNIT, WRONG, Caching, Make, by_id, errors, make_weights


def bring(it: Caching, request_id: int, lora: LoraRequest) -> None:
    """Announce weights as the engine's client does, and submit the request as the loop does."""
    AdapterCommands(it.cache, AdapterFolders()).expect_weights(request_id, lora.num_bytes)
    it.submit(request_id, lora)


def test_too_many_weights_are_refused_with_the_limits_name(make: Make) -> None:
    it = make(4)
    with it.paused():
        bring(it, 1, by_id(1, make_weights(1, units=3)))
        with pytest.raises(Unavailable) as refused:
            bring(it, 2, by_id(2, make_weights(2, units=2)))
        bring(it, 3, by_id(3, make_weights(3, units=1)))
    says = str(refused.value)
    assert f"lora_weights has {2 * UNIT} bytes, and {3 * UNIT} bytes of other requests'" in says
    assert f"at most lora_cache_host_memory_bytes of them together, which is {4 * UNIT}" in says
    it.settle()
    bring(it, 4, by_id(4, make_weights(4, units=4)))


def test_a_single_requests_weights_may_always_wait(make: Make) -> None:
    """A single request's weights are accepted at any size, so that the cache itself answers the request."""
    it = make(1)
    bring(it, 1, by_id(1, make_weights(1, units=2)))
    assert "PEFT Cache is full" in errors(it.next())[1]


def test_weights_stop_counting_once_stored_refused_or_given_up(make: Make) -> None:
    it = make(4)

    def waiting() -> int:
        return it.cache.waiting_weights.num_bytes

    bring(it, 1, by_id(1, make_weights(1)))
    it.settle()
    assert waiting() == 0, "stored"
    bring(it, 2, by_id(1, make_weights(2)))
    assert waiting() == 0, "not wanted: the id is known"
    bring(it, 3, by_id(3, WRONG))
    it.settle()
    assert waiting() == 0, "refused"
    bring(it, 4, LoraRequest(task_id=4, name="two names", weights=make_weights(4)))
    assert waiting() == 0, "refused at once"
    bring(it, 5, by_id(5, make_weights(5, units=9)))
    it.settle()
    assert waiting() == 0, "no room"
    with it.paused():
        bring(it, 6, by_id(6, make_weights(6)))
        bring(it, 7, by_id(6, make_weights(7)))
        assert waiting() == 2 * UNIT
        it.cache.forget(7)
        assert waiting() == UNIT, "ended"
    it.settle()
    assert waiting() == 0
