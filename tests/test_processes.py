"""Processes identified beyond their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from inflight.processes import ProcessId, this_parent


def test_an_identity_parsed_from_its_text_is_equal():
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
        assert found.wait(60)
    assert found.wait(0)
    assert ProcessId.of(child.pid) != found
    found.signal(signal.SIGKILL)


def test_a_later_process_with_the_same_number_is_not_equal():
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    earlier = replace(myself, start_time=myself.start_time - 1)
    assert earlier.wait(0)
    earlier.signal(signal.SIGKILL)  # reaches no process


def test_this_parent_is_the_parent_process():
    assert this_parent().pid == os.getppid()


def test_a_process_may_open_as_much_as_the_system_allows():
    program = (
        "import resource; from inflight.processes import raise_descriptor_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000)); raise_descriptor_limit();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1000", "1000"]


def test_an_import_without_collection_makes_none():
    program = """
import gc
from inflight.processes import without_collection
collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
with without_collection():
    kept = [[] for _ in range(10_000)]
    print(len(collections))
print(gc.isenabled(), gc.get_freeze_count())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "True", "0"]


def test_objects_of_a_loaded_process_are_exempt_from_collection():
    program = """
import gc
from inflight.processes import exempt_from_collection
kept = [[] for _ in range(10_000)]
exempt_from_collection()
print(gc.get_freeze_count() >= 10_000, len(gc.get_objects()) < 1_000)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


def test_a_parent_that_ends_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    parents = iter((ended.pid, os.getppid()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: next(parents))
        found = this_parent()
    assert found == ProcessId.of(os.getppid())
