"""The watchdog logs a stuck iteration, again whenever its duration doubles, and sleeps while the loop is idle."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from inflight.batch_manager.watchdog import Watchdog, all_stacks


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def watchdog(clock, log) -> Watchdog:
    """A watchdog without its thread: tests call `check`, which the thread calls when it wakes."""
    return Watchdog(10.0, log.append, clock, start=False)


def rows() -> str:
    return "3 rows, requests 4, 7"


def test_iterations_that_end_in_time_are_not_logged(watchdog, clock, log):
    for iteration in range(5):
        watchdog.begin(iteration, rows)
        clock.now_s += 9.9
        assert watchdog.check() and watchdog.stuck() is None
        watchdog.end()
        clock.now_s += 1000
    assert not watchdog.check() and watchdog.stuck() is None
    assert log == []


def test_a_stuck_iteration_is_logged_once_and_whenever_its_duration_doubles(watchdog, clock, log):
    watchdog.begin(7, rows)
    for waited, told in (
        (10.0, 1),
        (19.9, 1),
        (20.0, 2),
        (39.0, 2),
        (41.0, 3),
        (300.0, 4),
        (319.0, 4),
        (320.0, 5),
    ):
        clock.now_s = 100.0 + waited
        assert watchdog.check() and watchdog.check()
        assert len(log) == told
        assert watchdog.stuck() == f"iteration 7 has been running for {waited:.1f} s: 3 rows, requests 4, 7"
    heads = [message.splitlines()[0] for message in log]
    assert heads[0] == "iteration 7 has been running for 10.0 s: 3 rows, requests 4, 7"
    assert heads[3] == "iteration 7 has been running for 300.0 s: 3 rows, requests 4, 7"


def test_on_hang_is_called_once_per_iteration(clock, log):
    hung: list[str] = []
    watchdog = Watchdog(10.0, log.append, clock, start=False, hang_timeout_s=25.0, on_hang=hung.append)
    watchdog.begin(7, rows)
    for waited in (24.9, 25.0, 80.0):
        clock.now_s = 100.0 + waited
        assert watchdog.check()
        assert hung == (
            [] if waited < 25 else ["iteration 7 has been running for 25.0 s: 3 rows, requests 4, 7"]
        )


def test_a_hang_is_detected_before_anything_is_logged(clock, log):
    hung: list[str] = []
    watchdog = Watchdog(60.0, log.append, clock, start=False, hang_timeout_s=5.0, on_hang=hung.append)
    watchdog.begin(7, rows)
    clock.now_s += 5.0
    assert watchdog.check() and len(hung) == 1 and log == []


def test_the_end_of_a_logged_iteration_is_logged(watchdog, clock, log):
    watchdog.begin(7, rows)
    clock.now_s += 25
    watchdog.check()
    clock.now_s += 1.5
    watchdog.end()
    assert log[1:] == ["iteration 7 has ended after 26.5 s"]
    assert watchdog.stuck() is None
    watchdog.end()
    watchdog.begin(8, rows)
    clock.now_s += 9
    watchdog.check()
    watchdog.end()
    assert len(log) == 2


def test_a_late_iteration_that_was_not_checked_is_not_logged(watchdog, clock, log):
    watchdog.begin(7, rows)
    clock.now_s += 14
    watchdog.end()
    watchdog.begin(8, rows)
    watchdog.check()
    assert log == []


def test_a_hang_is_reported_although_the_state_cannot_be_described(watchdog, clock, log):
    watchdog.begin(7, lambda: 1 // 0)
    clock.now_s += 10
    watchdog.check()
    assert "running for 10.0 s: cannot be described: ZeroDivisionError" in log[0]
    assert "cannot be described" in watchdog.stuck()


def hold_the_line(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait()


@pytest.fixture
def held_thread():
    """A thread that is blocked in `hold_the_line`."""
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold_the_line, args=(entered, leave), name="the-loop")
    thread.start()
    entered.wait()
    yield thread
    leave.set()
    thread.join()


def test_the_message_has_every_threads_stack(watchdog, clock, log, held_thread):
    watchdog.begin(7, rows)
    clock.now_s += 10
    watchdog.check()
    message = log[0]
    assert f"thread the-loop ({held_thread.ident}):\n" in message
    assert "in hold_the_line" in message and "leave.wait()" in message
    assert "in all_stacks" not in message, "its own stack says nothing"


def test_all_stacks_has_this_thread_too_unless_it_is_left_out():
    me = threading.get_ident()
    assert f"({me})" in all_stacks() and f"({me})" not in all_stacks(besides=me)


def test_errors_go_to_the_log_by_default(clock, caplog):
    watchdog = Watchdog(1.0, clock=clock, start=False)
    watchdog.begin(7, rows)
    clock.now_s += 1
    with caplog.at_level(logging.ERROR, "inflight"):
        watchdog.check()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "iteration 7" in record.getMessage()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        Watchdog(timeout_s, start=False)


# ---------------------------------------------------------------------- the thread


class Waits:
    """A wait function that reports its timeout and returns when the test calls `wake`."""

    def __init__(self) -> None:
        self.begun: queue.Queue[float | None] = queue.Queue()
        self._wake = threading.Semaphore(0)

    def __call__(self, event: threading.Event, timeout_s: float | None) -> bool:
        self.begun.put(timeout_s)
        if timeout_s is None:
            return event.wait()
        self._wake.acquire()
        return event.is_set()

    def next(self) -> float | None:
        """Return the timeout of the next wait, as soon as it begins."""
        return self.begun.get(timeout=60)

    def wake(self) -> None:
        """Let a timeout pass."""
        self._wake.release()


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def running(clock, log, waits):
    """A watchdog with its thread."""
    watchdog = Watchdog(10.0, log.append, clock, waits)
    yield watchdog
    waits.wake()
    watchdog.close()
    assert not watchdog._thread.is_alive()
    watchdog.close()


def test_the_watchdog_sleeps_until_an_iteration_begins(running, waits, clock, log):
    assert waits.next() is None
    running.begin(1, rows)
    assert waits.next() == 5.0
    running.end()
    waits.wake()
    assert waits.next() is None


def test_the_watchdog_checks_every_half_timeout(running, waits, clock, log):
    assert waits.next() is None
    for iteration in range(50):
        running.begin(iteration, rows)
        running.end()
    running.begin(50, rows)
    assert waits.next() == 5.0
    assert waits.begun.empty()
    clock.now_s += 5
    waits.wake()
    assert waits.next() == 5.0 and log == []
    clock.now_s += 5
    waits.wake()
    assert waits.next() == 5.0 and len(log) == 1


def test_an_iteration_that_begins_while_the_watchdog_falls_asleep_is_seen(clock, log):
    """Between the last check and the sleep the event that `begin` sets must not be lost."""
    watchdog = Watchdog(10.0, log.append, clock, start=False)
    watchdog._is_needed.set()
    clear = watchdog._is_needed.clear

    def begin_then_clear() -> None:
        watchdog.begin(3, rows)
        clear()

    watchdog._is_needed.clear = begin_then_clear
    assert watchdog.check(), "it has to look again soon"

    def clear_then_begin() -> None:
        clear()
        watchdog.begin(4, rows)

    watchdog.end()
    watchdog._is_needed.clear = clear_then_begin
    assert watchdog.check() and watchdog._is_needed.is_set()


def test_closing_ends_a_thread_that_sleeps(clock, log, waits):
    watchdog = Watchdog(10.0, log.append, clock, waits)
    assert waits.next() is None
    watchdog.close()
    assert not watchdog._thread.is_alive()


def test_closing_ends_a_thread_that_has_not_checked_yet(clock, log):
    for _ in range(200):
        watchdog = Watchdog(10.0, log.append, clock)
        watchdog.close()
        assert not watchdog._thread.is_alive()
