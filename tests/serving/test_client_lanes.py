"""Jobs on threads: concurrent for different clients, in order for each client."""

from __future__ import annotations

import threading

import pytest

from inflight.serving.client_lanes import NOBODY, ClientLanes, Job

WAIT_S = 30


class Journal:
    """Journal of events, in order, with jobs that wait until they are released."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def job(self, name: str, waits: bool = False) -> Job:
        gate = self.gates[name] = threading.Event()
        if not waits:
            gate.set()

        def run() -> None:
            self._note(f"{name} begins")
            assert gate.wait(WAIT_S)
            self._note(f"{name} ends")

        return run

    def wait_for(self, line: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.lines, WAIT_S), (line, self.lines)

    def _note(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()


def test_a_clients_jobs_run_one_after_the_other() -> None:
    lanes, journal = ClientLanes(3), Journal()
    lanes.submit(7, journal.job("first", waits=True))
    lanes.submit(7, journal.job("second"))
    lanes.submit(7, journal.job("third"))
    journal.wait_for("first begins")
    assert lanes.is_busy(7) and not lanes.are_idle
    journal.gates["first"].set()
    journal.wait_for("third ends")
    lanes.close()
    names = ("first", "second", "third")
    assert journal.lines == [f"{name} {what}" for name in names for what in ("begins", "ends")]
    assert not lanes.is_busy(7) and lanes.are_idle


@pytest.mark.parametrize(("one", "other"), [(1, 2), (NOBODY, NOBODY), (NOBODY, 1)])
def test_a_slow_client_does_not_delay_others(one: int, other: int) -> None:
    lanes, journal = ClientLanes(2), Journal()
    lanes.submit(one, journal.job("slow", waits=True))
    lanes.submit(other, journal.job("quick"))
    journal.wait_for("quick ends")
    assert "slow ends" not in journal.lines
    journal.gates["slow"].set()
    lanes.close()
    assert journal.lines[-1] == "slow ends"


def test_requests_without_a_client_are_never_busy() -> None:
    lanes, journal = ClientLanes(1), Journal()
    lanes.submit(NOBODY, journal.job("slow", waits=True))
    assert not lanes.is_busy(NOBODY) and lanes.are_idle
    journal.gates["slow"].set()
    lanes.close()


def test_close_waits_for_running_jobs_and_drops_waiting_ones() -> None:
    lanes, journal = ClientLanes(1), Journal()
    lanes.submit(7, journal.job("begun", waits=True))
    lanes.submit(7, journal.job("behind it"))
    lanes.submit(8, journal.job("another client's"))
    journal.wait_for("begun begins")
    closing = threading.Thread(target=lanes.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    journal.gates["begun"].set()
    closing.join(WAIT_S)
    assert journal.lines == ["begun begins", "begun ends"]
    with pytest.raises(RuntimeError):
        lanes.submit(9, journal.job("too late"))


def test_jobs_that_wait_delay_those_of_their_client_alone() -> None:
    lanes, journal = ClientLanes(1, 2), Journal()
    lanes.submit(1, journal.job("waits", waits=True), waits=True)
    lanes.submit(NOBODY, journal.job("waits too", waits=True), waits=True)
    lanes.submit(1, journal.job("comes after"))
    lanes.submit(2, journal.job("computes"))
    journal.wait_for("computes ends")
    assert "comes after begins" not in journal.lines
    for name in ("waits", "waits too"):
        journal.gates[name].set()
    journal.wait_for("comes after ends")
    assert journal.lines.index("waits ends") < journal.lines.index("comes after begins")
    lanes.close()
