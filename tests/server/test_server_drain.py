"""The conditions under which a server counts as idle."""

import os
import subprocess
from collections.abc import Callable

import pytest

from inflight.server.drain import IdleWatch, stubs_processor_time


class Readings:
    """A clock and a processor time that the test sets."""

    def __init__(self) -> None:
        self.now, self.used = 0.0, 0.0
        self.watch = IdleWatch(lambda: self.used, lambda: self.now)

    def after(self, seconds: float, used: float = 0.0) -> float:
        self.now += seconds
        self.used += used
        return self.watch.seconds()


@pytest.mark.parametrize(("used", "expected"), [(0.0, 3), (0.03, 3), (0.3, 0)])
def test_a_model_with_processor_time_counts_as_draining(used: float, expected: int) -> None:
    assert Readings().after(3, used) == expected


def test_work_restarts_the_time_until_a_server_counts_as_idle() -> None:
    readings = Readings()
    assert [readings.after(1), readings.after(1, used=0.5), readings.after(1)] == [1, 0, 1]


def test_the_group_leaders_processor_time_is_not_counted(burning: "Callable[[], int]") -> None:
    group = burning()
    assert stubs_processor_time(group) >= 0.05
    assert stubs_processor_time(os.getpid()) == 0


@pytest.fixture
def burning() -> "Callable[[], int]":
    """Start a resting leader with a child that has used some processor time."""
    script = "(i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; exec sleep 60) & wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)

    def start() -> int:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        return process.pid

    yield start
    os.killpg(process.pid, 9)
    process.communicate()
