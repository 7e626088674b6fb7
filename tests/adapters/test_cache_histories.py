"""Long histories of the host cache: compared with a slow oracle, and with many threads at once."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest

from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.errors import InflightError
from tests.tiers import with_all

from .caching import UNIT, Make, by_id, make_weights, tag_of


class Oracle:
    """A simple reference cache that recomputes everything at each step."""

    def __init__(self, max_units: int) -> None:
        self.max_units = max_units
        self.now = 0
        self.stored: dict[int, tuple[int, int]] = {}  # by task: tag, units
        self.last_use: dict[int, int] = {}
        self.users: dict[int, tuple[int, int]] = {}  # by request: task, tag
        self.retired: dict[int, int] = {}  # by tag: units of adapters unloaded while in use

    def is_used(self, task: int) -> bool:
        return (task, self.stored[task][0]) in self.users.values()

    def taken(self) -> int:
        return sum(units for _, units in self.stored.values()) + sum(self.retired.values())

    def submit(self, request: int, task: int, tag: int, units: int, has_weights: bool) -> str:
        self.now += 1
        if task not in self.stored:
            if not has_weights:
                return "NOT_FOUND"
            if units > self.max_units:
                return "INVALID_ARG"
            in_use = sum(self.stored[each][1] for each in self.stored if self.is_used(each))
            if in_use + sum(self.retired.values()) + units > self.max_units:
                return "UNAVAILABLE"
            while self.taken() + units > self.max_units:
                idle = [each for each in self.stored if not self.is_used(each)]
                del self.stored[min(idle, key=lambda each: self.last_use[each])]
            self.stored[task] = tag, units
        self.users[request] = task, self.stored[task][0]
        return ""

    def forget(self, request: int) -> None:
        self.now += 1
        task, tag = self.users.pop(request)
        if (task, tag) not in self.users.values():
            self.retired.pop(tag, None)
            self.last_use[task] = self.now

    def unload(self, task: int) -> None:
        tag, units = self.stored[task]
        if self.is_used(task):
            self.retired[tag] = units
        del self.stored[task]


@pytest.mark.parametrize("seed", with_all(range(30), range(10)))
def test_random_histories_match_the_oracle(make: Make, seed: int) -> None:
    chance = random.Random(seed)
    max_units = chance.randint(2, 12)
    it, oracle = make(max_units), Oracle(max_units)
    known: dict[int, int] = {}  # tags of handles that were reported to the core and not dropped
    for number in range(1, 250):
        doing = chance.random()
        if doing < 0.5:
            task, units = chance.randrange(8), chance.randint(1, 4)
            has_weights = chance.random() < 0.8
            weights = make_weights(number, units) if has_weights else None
            if number.to_bytes(UNIT, "little")[:1] == b"\xff":
                continue
            expected = oracle.submit(number, task, number, units, has_weights)
            it.submit(number, by_id(task, weights))
            update = it.settle()
            known |= {each.handle: tag_of(each.weights) for each in update.stored}
            (event,) = update.events
            assert event.error_kind == expected, f"seed {seed}, request {number}"
            if not expected:
                assert known[event.handle] == oracle.users[number][1]
        elif doing < 0.9 and oracle.users:
            request = chance.choice(list(oracle.users))
            oracle.forget(request)
            it.cache.forget(request)
            update = it.cache.update()
        elif oracle.stored:
            task = chance.choice(list(oracle.stored))
            oracle.unload(task)
            it.cache.unload(task)
            update = it.cache.update()
        else:
            continue
        for handle in update.dropped:
            assert known.pop(handle) not in [tag for _, tag in oracle.users.values()], "it is in use"
        tags = {tag for tag, _ in oracle.stored.values()} | set(oracle.retired)
        assert set(known.values()) == tags
        infos = it.cache.list_adapters()
        assert sum(each.num_bytes for each in infos) == UNIT * oracle.taken() <= UNIT * max_units
        assert {each.task_id for each in infos if each.state != "unloading"} == set(oracle.stored)
        assert {each.task_id for each in infos if each.state == "in use"} == set(
            filter(oracle.is_used, oracle.stored)
        )


def test_the_cache_is_consistent_after_many_threads(make: Make) -> None:
    """After requests beside threads that list, load and unload, no adapter is in use and the bytes add up."""
    it = make(6)
    it.folders.adapters |= {LoraRequest(name=f"n{n}"): make_weights(n, 1 + n % 3) for n in range(6)}
    is_over = threading.Event()

    def meddle(seed: int) -> None:
        chance = random.Random(seed)
        while not is_over.is_set():
            name = f"n{chance.randrange(6)}"
            with suppress(InflightError):
                chance.choice([it.cache.load, it.cache.unload, lambda _: it.cache.list_adapters()])(name)

    threads = [threading.Thread(target=meddle, args=(seed,)) for seed in range(2)]
    for each in threads:
        each.start()
    chance, running, handles = random.Random(5), set[int](), set[int]()
    answered = set[int]()

    def take(update: AdapterUpdate) -> None:
        handles.update(each.handle for each in update.stored)
        for event in update.events:
            assert event.request_id in running - answered
            assert event.error_kind or event.handle in handles
            answered.add(event.request_id)
        handles.difference_update(update.dropped)

    def end(number: int) -> None:
        running.discard(number)
        it.cache.forget(number)

    for number in range(600):
        it.submit(number, LoraRequest(name=f"n{chance.randrange(6)}"))
        running.add(number)
        if chance.random() < 0.1:
            end(chance.choice(sorted(running)))
        take(it.cache.update())
        while len(running) > 5:
            while not running & answered:
                take(it.next())
            end(chance.choice(sorted(running & answered)))
    is_over.set()
    for each in threads:
        each.join()
    for each in tuple(running):
        end(each)
    it.settle()
    assert len(answered) > 400
    assert not it.cache._used and not it.cache._waiting and not it.cache._unloading
    infos = it.cache.list_adapters()
    assert sum(each.num_bytes for each in infos) == it.cache._num_bytes == it.cache._idle_bytes
