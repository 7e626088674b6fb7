"""Processes by an identity that outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

from inflight.processes import ProcessId, this_parent


def test_an_identity_survives_its_text():
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    assert ProcessId.parse(str(myself)) == myself


def test_a_process_that_runs_has_not_ended_and_is_its_parents_child():
    with subprocess.Popen(["sleep", "60"]) as child:
        found = ProcessId.of(child.pid)
        assert found is not None
        assert not found.wait(0)
        myself = ProcessId.of(os.getpid())
        assert myself is not None and found in myself.children()
        found.signal(signal.SIGKILL)
        assert found.wait(10)
    assert found.wait(0)
    assert ProcessId.of(child.pid) != found
    found.signal(signal.SIGKILL)


def test_a_later_process_with_the_same_number_is_another():
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    earlier = replace(myself, start_time=myself.start_time - 1)
    assert earlier.wait(0)
    earlier.signal(signal.SIGKILL)  # nobody


def test_a_parent_is_found():
    assert this_parent().pid == os.getppid()
