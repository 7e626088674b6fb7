"""The host cache with made-up adapters: storing, eviction, refusals and waiting requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.lora_rows import CheckedAdapter
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, LoraRequest
from inflight.core.request.request import Origin
from inflight.errors import ConfigError, InflightError, InvalidArgument, NotFound, StepFailed, Unavailable
from tests.lines_of import call_for, lines_of

from .caching import WAIT_S, WRONG, Make, by_id, errors, make_weights, ready


def test_weights_are_stored_and_then_known_by_their_id(make: Make) -> None:
    it = make()
    first = it.run(1, by_id(7, make_weights(5)))
    (stored,) = first.stored
    assert (stored.task_id, stored.rank, stored.digest, stored.weights) == (7, 1, b"\5" * 16, make_weights(5))
    assert first.events == (AdapterEvent(1, stored.handle),)
    it.submit(2, by_id(7))
    assert it.cache.update() == AdapterUpdate(events=(AdapterEvent(2, stored.handle),)), "at once"
    it.submit(3, by_id(7, make_weights(6)))
    assert it.cache.update().events == (AdapterEvent(3, stored.handle),), (
        "weights that come again are ignored"
    )
    assert it.folders.reads == [by_id(7)]
    assert not it.cache.update()


def test_weights_sent_twice_at_once_are_stored_once(make: Make) -> None:
    it = make()
    with it.paused():
        for number in (1, 2, 3):
            it.submit(number, by_id(7, make_weights(number)))
        it.submit(4, by_id(7))
    update = it.settle()
    assert len(update.stored) == 1
    assert ready(update) == dict.fromkeys((1, 2, 3, 4), update.stored[0].handle)
    assert it.folders.reads == [by_id(7)]


def test_invalid_weights_fail_only_their_request(make: Make) -> None:
    it = make()
    with it.paused():
        it.submit(1, by_id(7, WRONG))
        it.submit(2, by_id(7))
        it.submit(3, by_id(7, make_weights(3)))
        it.submit(4, by_id(8, WRONG))
        it.submit(5, by_id(8))
    update = it.settle()
    assert errors(update) == {
        1: "INVALID_ARG: these weights are wrong",
        4: "INVALID_ARG: these weights are wrong",
        5: "NOT_FOUND: 8 is nowhere",
    }
    assert ready(update) == dict.fromkeys((2, 3), update.stored[0].handle)
    assert update.stored[0].digest == b"\3" * 16


def test_a_missing_adapter_is_looked_up_again(make: Make) -> None:
    it = make()
    assert errors(it.run(1, LoraRequest(name="new"))) == {1: "NOT_FOUND: new is nowhere"}
    it.folders.adapters[LoraRequest(name="new")] = make_weights()
    assert ready(it.run(2, LoraRequest(name="new"))) == {2: 0}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ZeroDivisionError("oh"), "INTERNAL: LoRA adapter it could not be loaded: ZeroDivisionError('oh')"),
        (MemoryError(), "INTERNAL: LoRA adapter it could not be loaded: MemoryError()"),
        (ConfigError("no file"), "INVALID_ARG: LoRA adapter it: no file"),
        (InvalidArgument("no number"), "INVALID_ARG: no number"),
    ],
)
def test_an_error_of_any_kind_fails_the_waiting_requests_and_not_the_thread(
    make: Make, error: BaseException, says: str
) -> None:
    it = make()
    it.folders.adapters[LoraRequest(name="it")] = error
    with it.paused():
        it.submit(1, LoraRequest(name="it"))
        it.submit(2, LoraRequest(name="it"))
    assert errors(it.settle()) == {1: says, 2: says}
    assert ready(it.run(3, by_id(1, make_weights()))) == {3: 0}


def test_log_lines_name_the_request_that_an_adapter_is_read_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = make()
    monkeypatch.setattr(it.cache, "_read", lambda lora: 1 / 0)
    with lines_of("inflight.adapters.cache") as lines:
        for number, task_id, weights in ((1, 7, make_weights()), (2, 8, None)):
            it.cache.submit(number, by_id(task_id, weights), Origin("openai", f"id-{number}"))
            it.settle()
        with pytest.raises(StepFailed):
            call_for("command", it.cache.load, "sql").result(WAIT_S)
        it.run(3, by_id(9))
    assert lines == [
        "the LoRA adapter 7 could not be loaded request_id=id-1",
        "the LoRA adapter 8 could not be loaded request_id=id-2",
        "the LoRA adapter sql could not be loaded request_id=command",
        "the LoRA adapter sql is refused: LoRA adapter sql could not be loaded: "
        "ZeroDivisionError('division by zero') request_id=command",
        "the LoRA adapter 9 could not be loaded",
    ]


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (LoraRequest(), "lora_task_id must be set for LoRA inference"),
        (LoraRequest(weights=make_weights()), "lora_task_id must be set for LoRA inference"),
        (LoraRequest(name="a", weights=make_weights()), "lora_task_id must be set for LoRA inference"),
        (LoraRequest(task_id=0, name="a"), "expected one of lora_task_id, lora_name and lora_path"),
        (LoraRequest(path="a", name="a"), "expected one of lora_task_id, lora_name and lora_path"),
    ],
)
def test_missing_and_conflicting_adapter_names_are_refused(make: Make, lora: LoraRequest, says: str) -> None:
    it = make()
    assert errors(it.run(1, lora))[1].startswith(f"INVALID_ARG: {says}")
    assert it.folders.reads == []


def test_adapter_id_zero_is_valid(make: Make) -> None:
    assert ready(make().run(1, by_id(0, make_weights()))) == {1: 0}


def test_the_least_recently_used_idle_adapter_is_evicted_first(make: Make) -> None:
    it = make(3)
    handles = {}
    for task in (1, 2, 3):
        handles[task] = it.run(task, by_id(task, make_weights(task))).stored[0].handle
        it.cache.forget(task)
    it.run(11, by_id(1, make_weights(99)))  # weights sent again make the adapter the most recently used
    it.cache.forget(11)
    update = it.run(4, by_id(4, make_weights(4, 2)))
    assert update.dropped == (handles[2], handles[3])
    assert it.states == {1: "idle", 4: "in use"}


def test_adapters_in_use_are_not_evicted_and_a_full_cache_is_an_error(make: Make) -> None:
    it = make(3)
    it.run(1, by_id(1, make_weights(1, 2)))
    it.run(2, by_id(2, make_weights(2)))
    it.cache.forget(2)
    says = "UNAVAILABLE: PEFT Cache is full. Could not store taskId=3: it takes 8 bytes"
    assert errors(it.run(3, by_id(3, make_weights(3, 2))))[3].startswith(says)
    assert it.states == {1: "in use", 2: "idle"}, "nothing is evicted in vain"
    it.cache.forget(1)
    assert ready(it.run(4, by_id(3, make_weights(3, 2))))
    says = "INVALID_ARG: PEFT Cache is full. Could not store taskId=5: it takes 16 bytes, expected at most"
    assert errors(it.run(5, by_id(5, make_weights(5, 4))))[5].startswith(says)


def test_an_adapter_stored_again_has_another_handle(make: Make) -> None:
    it = make(1)
    first = it.run(1, by_id(1, make_weights(1)))
    it.cache.forget(1)
    second = it.run(2, by_id(2, make_weights(2)))
    assert second.dropped == (first.stored[0].handle,)
    it.cache.forget(2)
    third = it.run(3, by_id(1, make_weights(1)))
    assert third.stored[0].handle not in (first.stored[0].handle, second.stored[0].handle)


def test_an_ended_request_gets_no_adapter_event(make: Make) -> None:
    it = make()
    with it.paused():
        it.submit(1, by_id(1, make_weights(1)))
        it.folders.started.get(timeout=WAIT_S)
        it.submit(2, by_id(1))
        it.submit(3, by_id(3, make_weights(3)))
        it.cache.forget(1)
        it.cache.forget(3)
    update = it.settle()
    assert ready(update) == {2: 0}
    assert by_id(3) not in it.folders.reads, "nobody wants it any more"
    it.submit(4, by_id(1))
    it.cache.forget(4)
    assert not it.cache.update().events
    it.cache.forget(4)
    it.cache.forget(999)
    it.cache.forget(2)
    assert it.states == {1: "idle"}


def test_weights_of_a_cancelled_request_are_kept(make: Make) -> None:
    it = make()
    with it.paused():
        it.submit(1, by_id(1, make_weights(1)))
        it.folders.started.get(timeout=WAIT_S)
        it.cache.forget(1)
    assert not it.settle()
    assert ready(it.run(2, by_id(1))) == {2: 0}


def test_the_core_is_told_of_an_adapter_at_its_first_use(make: Make) -> None:
    it = make(2)
    it.folders.adapters |= {LoraRequest(name=name): make_weights() for name in "abc"}
    for name in "abc":
        assert it.cache.load(name).result(WAIT_S).state == "idle"
    assert not it.cache.update(), "one that came and went unused is not spoken of"
    assert it.states == {"b": "idle", "c": "idle"}
    assert [each.handle for each in it.run(1, LoraRequest(name="b")).stored] == [1]


def test_adapters_are_listed_loaded_and_unloaded(make: Make) -> None:
    it = make(4)
    it.folders.adapters[LoraRequest(name="a")] = make_weights(1, 2)
    info = it.cache.load("a").result(WAIT_S)
    assert (info.name, info.state, info.rank, info.num_bytes, info.users) == ("a", "idle", 1, 8, 0)
    assert it.cache.load("a").result(WAIT_S) == info
    assert len(it.folders.reads) == 1
    handle = it.run(1, LoraRequest(name="a")).stored[0].handle
    assert [(each.state, each.users) for each in it.cache.list_adapters()] == [("in use", 1)]
    it.folders.adapters[LoraRequest(name="a")] = make_weights(2, 2)
    it.cache.unload("a")
    assert [(each.state, each.users) for each in it.cache.list_adapters()] == [("unloading", 1)]
    assert not it.cache.update(), "its request goes on with it"
    update = it.run(2, LoraRequest(name="a"))
    assert update.stored[0].digest == b"\2" * 16, "what is in the folder now"
    says = "UNAVAILABLE: PEFT Cache is full"
    assert errors(it.run(3, by_id(3, make_weights())))[3].startswith(says), "what it takes counts to its end"
    it.cache.forget(1)
    assert it.cache.update().dropped == (handle,)
    it.cache.forget(2)
    it.cache.unload("a")
    assert it.cache.update().dropped == (update.stored[0].handle,)
    assert it.cache.list_adapters() == ()
    with pytest.raises(NotFound, match=r"LoRA adapter a is not loaded$"):
        it.cache.unload("a")
    it.folders.adapters[LoraRequest(name="summary")] = make_weights(1, 2)
    it.cache.load("summary").result(WAIT_S)
    with pytest.raises(NotFound, match=r"sumary is not loaded; loaded are summary; did you mean 'summary'\?"):
        it.cache.unload("sumary")
    with pytest.raises(NotFound, match="b is nowhere"):
        it.cache.load("b").result(WAIT_S)


def test_adapters_are_unloaded_by_id_or_path(make: Make) -> None:
    it = make()
    it.folders.adapters[LoraRequest(path="x/y")] = make_weights()
    it.run(1, LoraRequest(path="x/y"))
    it.run(2, by_id(5, make_weights()))
    it.cache.unload("x/y")
    it.cache.unload(5)
    assert [each.state for each in it.cache.list_adapters()] == ["unloading"] * 2
    with pytest.raises(NotFound):
        it.cache.unload("5")


def test_an_adapter_with_a_numeric_name_has_no_id(make: Make) -> None:
    it = make()
    it.folders.adapters[LoraRequest(name="7")] = make_weights()
    assert it.run(1, LoraRequest(name="7")).stored[0].task_id is None
    assert errors(it.run(2, by_id(7))) == {2: "NOT_FOUND: 7 is nowhere"}


def test_prefetching_stops_when_the_cache_is_full(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    it = make(3)
    it.folders.adapters |= {by_id(n): make_weights(n, 1) for n in (1, 2, 4, 5)} | {
        by_id(3): WRONG,
        by_id(6): OSError("no disk"),
    }
    it.cache.prefetch([1, 2, 3, 6, 4, 5])
    assert it.states == dict.fromkeys((1, 2, 4), "idle")
    assert "task 3 is skipped: these weights are wrong" in caplog.text
    assert "adapters from task 5 on" in caplog.text
    assert ready(it.run(1, by_id(5))), "it is read on a miss"
    assert it.states == {2: "idle", 4: "idle", 5: "in use"}


def test_the_loop_does_not_wait_while_an_adapter_is_read(make: Make) -> None:
    it = make()
    it.run(1, by_id(1, make_weights(1)))
    with it.paused():
        it.submit(2, by_id(2, make_weights(2)))
        it.folders.started.get(timeout=WAIT_S)
        it.submit(3, by_id(1))
        assert ready(it.cache.update()) == {3: 0}
        assert [each.state for each in it.cache.list_adapters()] == ["in use", "loading"]
        it.cache.unload(1)
        it.cache.forget(2)


def test_requests_that_wait_for_a_load_are_answered_when_the_cache_closes(make: Make) -> None:
    it = make()
    raised: list[Exception] = []

    def load() -> None:
        try:
            it.cache.load("b").result(WAIT_S)
        except InflightError as error:
            raised.append(error)

    with it.paused():
        it.submit(1, LoraRequest(name="a"))
        it.folders.started.get(timeout=WAIT_S)
        thread = threading.Thread(target=load)
        thread.start()
        while "b" not in it.states:
            pass
        closing = threading.Thread(target=it.cache.close)
        closing.start()
        while not it.cache._is_closed:
            pass
    closing.join()
    thread.join()
    assert isinstance(raised[0], Unavailable)
    with pytest.raises(Unavailable):
        it.cache.load("c").result(WAIT_S)


def test_a_requests_cost_does_not_grow_with_stored_adapters(make: Make) -> None:
    """The work for a request does not grow with the number of stored adapters: no other entry is read."""
    it = make(2000)

    class Counting(dict[LoraRequest, Any]):
        walks = 0

        def __iter__(self) -> Iterator[LoraRequest]:
            Counting.walks += 1
            return super().__iter__()

        def items(self) -> Any:
            Counting.walks += 1
            return super().items()

        def values(self) -> Any:
            Counting.walks += 1
            return super().values()

    it.folders.adapters |= {LoraRequest(name=f"n{n}"): make_weights() for n in range(1000)}
    for n in range(1000):
        it.cache.load(f"n{n}").result(WAIT_S)
    it.cache._entries = Counting(it.cache._entries)
    for n in range(1000):
        it.submit(n, LoraRequest(name=f"n{n % 7}"))
        assert len(it.cache.update().events) == 1
        it.cache.forget(n)
    assert Counting.walks == 0


def test_a_bug_fails_the_waiting_requests_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    made_room = HostAdapterCache._make_room
    cache = HostAdapterCache(lambda lora: CheckedAdapter(1, b"x" * 16, make_weights()), 1 << 20, lambda: None)
    monkeypatch.setattr(HostAdapterCache, "_make_room", fail)
    with pytest.raises(StepFailed, match="a bug"):
        cache.load("first").result(WAIT_S)
    monkeypatch.setattr(HostAdapterCache, "_make_room", made_room)
    cache.load("second").result(WAIT_S)
    assert [each.name for each in cache.list_adapters()] == ["second"]
    cache.close()


def test_a_folders_error_is_reported_until_the_folder_can_be_read(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    it = make()
    broken = LoraRequest(name="broken")
    it.folders.adapters[broken] = ConfigError("it has no weights")
    for number in (1, 2):
        assert errors(it.run(number, broken)) == {
            number: "INVALID_ARG: LoRA adapter broken: it has no weights"
        }
        assert it.cache.problems() == {"broken": "LoRA adapter broken: it has no weights"}
    assert caplog.text.count("broken is refused") == 1
    assert errors(it.run(3, LoraRequest(name="nowhere"))) and set(it.cache.problems()) == {"broken"}
    it.folders.adapters[broken] = make_weights(1)
    assert ready(it.run(4, broken)) and it.cache.problems() == {}
