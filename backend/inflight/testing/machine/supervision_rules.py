"""Checks of a run of the supervision that has ended: when it restarts, gives up and ends, and its log."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from typing import TYPE_CHECKING

from inflight.interrupts import INTERRUPTED

from .kernel import ProcessEntry

if TYPE_CHECKING:
    from .launcher import Launcher

_RESTARTED_S = 20.0
"""Seconds from a loss to the next start, at most: two of them a pause, the others for ending what is left."""
_PAUSES_S = (0.0, 0.5, 1.0, 2.0)
_PROVEN_S = 60.0
_ENDPOINTS_RESTART_S = 4.0
_LOOKS_S = 1.0  # of a thread that sees a fault late
_LOG_S = 2.0  # for which the log of a lost server is waited for, before a signal is looked at
_AGAIN = re.compile(r"serve: .*the server is started again (?:now|in ([\d.]+) s)$")
_SILENT = re.compile(r".* guard\.py\] the process of the model (\S+) has been silent")
_ENDED = re.compile(
    r"serve: (tritonserver|the OpenAI endpoint) ended.*\(exit status (-?\d+)\).* (now|in ([\d.]+) s)$"
)


def check_restarts(launcher: Launcher) -> None:
    """Check that lost servers and processes of /v1 are started again, neither late nor too often."""
    first_signal_s = launcher.signals[0][0] if launcher.signals else float("inf")
    tritons = [each.task for each in launcher.programs.tritons]
    for before, after in pairwise(tritons):
        gap_s = started_s(launcher, after) - ended_s(launcher, before)
        late_s = _RESTARTED_S + disturbed_s(launcher, ended_s(launcher, before), started_s(launcher, after))
        assert gap_s <= late_s, f"the next server is started {gap_s:.1f} s after a loss"
        is_new = started_s(launcher, after) < first_signal_s + _LOOKS_S or not launcher.ready_s
        assert is_new or disturbed_s(launcher, first_signal_s, started_s(launcher, after)), (
            "a server is started after a signal"
        )
    endpoints = [each.task for each in launcher.programs.endpoints]
    num_lost = 0
    for before, after in pairwise(endpoints):
        lost_s, again_s = ended_s(launcher, before), started_s(launcher, after)
        if before.environment != after.environment:  # of another server
            num_lost = 0
            continue
        is_before_end = again_s < first_signal_s + _LOG_S + _LOOKS_S
        assert is_before_end or disturbed_s(launcher, first_signal_s, again_s), (
            "/v1 is started during the end"
        )
        ran_s = lost_s - started_s(launcher, before)
        num_lost = 0 if ran_s > _PROVEN_S - 1 else num_lost
        gap_s = again_s - lost_s
        assert gap_s <= _ENDPOINTS_RESTART_S + disturbed_s(launcher, lost_s, again_s), (
            f"/v1 is started after {gap_s:.1f} s"
        )
        assert gap_s >= _PAUSES_S[min(num_lost, 3)] - 0.01, f"/v1 is started after {gap_s:.1f} s already"
        num_lost += 1


def check_lines(launcher: Launcher) -> None:
    """Check that each line about a lost process has its exit status, and a pause of those that are documented."""
    tritons = [each.task for each in launcher.programs.tritons]
    endpoints = [each.task for each in launcher.programs.endpoints]
    for time_s, line in launcher.echo.lines:
        if (found := _ENDED.match(line)) is None:
            assert "ended (exit status" not in line or "is started again" not in line, line
            continue
        tasks = tritons if found[1] == "tritonserver" else endpoints
        ended = [task for task in tasks if task.status is not None and ended_s(launcher, task) <= time_s]
        assert ended, f"nothing has ended: {line}"
        assert ended[-1].status == int(found[2]), f"it ended with {ended[-1].status}: {line}"
        assert float(found[4] or 0) in _PAUSES_S, line
    _check_pauses(launcher)
    _check_alarms(launcher)


def _check_pauses(launcher: Launcher) -> None:
    """Check that the pauses before starts of servers grow with the losses in a row."""
    index, before_s = -1, 0.0
    for time_s, line in launcher.echo.lines:
        if (found := _AGAIN.match(line)) is None:
            continue
        ready_s = max((each for each in launcher.ready_s if before_s <= each <= time_s), default=time_s)
        pause = _PAUSES_S.index(float(found[1] or 0))
        if time_s - ready_s < _PROVEN_S - _LOOKS_S:
            assert pause == min(index + 1, len(_PAUSES_S) - 1), f"after a pause of number {index}: {line}"
        index, before_s = pause, time_s


def _check_alarms(launcher: Launcher) -> None:
    """Check that no guard takes a process for silent that was never stopped."""
    for time_s, line in launcher.echo.lines:
        if (found := _SILENT.match(line)) is not None:
            stopped = [
                task
                for at_s, task, event in launcher.kernel.log
                if event == "stopped" and at_s < time_s and f"/{found[1]}/" in " ".join(task.arguments)
            ]
            assert stopped, line


def check_end(launcher: Launcher, further_s: float, hurry_s: float) -> None:
    """Check how the launcher ended, and that it took no longer than promised.

    Args:
        launcher: The launcher.
        further_s: Seconds that it may take in addition to the exit timeout.
        hurry_s: Seconds that it may take after a second signal.
    """
    end_s = ended_s(launcher, launcher.process)
    if launcher.signals:
        first_s = launcher.signals[0][0]
        longest_s = (
            max(1.0, launcher.options.exit_timeout_s) + further_s + disturbed_s(launcher, first_s, end_s)
        )
        assert end_s - first_s <= longest_s, f"the end takes {end_s - first_s:.1f} s\n{launcher.describe()}"
    if len(launcher.signals) > 1:
        second_s = launcher.signals[1][0]
        assert end_s - second_s <= hurry_s + disturbed_s(launcher, second_s, end_s), (
            "a second signal does not end it"
        )
    if launcher.error is None:
        assert launcher.signals, "the supervision has ended by itself"
        is_start = launcher.signals[0][1] == signal.SIGINT and not launcher.ready_s
        first, last = INTERRUPTED if is_start else 0, 128 + launcher.signals[-1][1]
        expected = {first, last} if end_s - launcher.signals[-1][0] < 0.5 else {last}
        assert launcher.status in (expected if len(launcher.signals) > 1 else {first}), (
            f"exit status {launcher.status}"
        )
    else:
        _check_error(launcher, str(launcher.error), end_s)


def _check_error(launcher: Launcher, said: str, end_s: float) -> None:
    restarts, served = launcher.options.restarts, bool(launcher.ready_s)
    attempts = (
        sum(attempt_s > launcher.ready_s[-1] for attempt_s in launcher.attempts_s)
        if served
        else len(launcher.attempts_s)
    )
    first = said.splitlines()[0]
    if "had not finished after" in first:
        assert launcher.signals, first
        return
    if served and attempts:
        assert attempts == max(1, restarts), f"given up after {attempts} of {restarts} starts: {first}"
    elif served:
        triton = launcher.programs.tritons[-1]
        is_ended_in_order = triton.ends_by_order_of_others and triton.task.status == 0
        assert not restarts or is_ended_in_order, f"not restarted: {first}\n{launcher.describe()}"
    elif attempts > 1:
        assert attempts <= restarts, f"{attempts} attempts of a first start"


def started_s(launcher: Launcher, task: ProcessEntry) -> float:
    """Return when a process was started."""
    return next(time_s for time_s, each, event in launcher.kernel.log if each is task and event == "started")


def ended_s(launcher: Launcher, task: ProcessEntry) -> float:
    """Return when a process ended."""
    ended = (
        time_s for time_s, each, event in launcher.kernel.log if each is task and event.startswith("ended")
    )
    return next(ended, float("inf"))


def disturbed_s(launcher: Launcher, begin_s: float, end_s: float) -> float:
    """Return for how many seconds of a time the launcher was stopped, or no process could be started, and a second
    for each of these times."""
    overlaps = [min(end_s, end) - max(begin_s, begin) for begin, end in launcher.disturbances]
    return sum(each + 1.0 for each in overlaps if each > 0)
