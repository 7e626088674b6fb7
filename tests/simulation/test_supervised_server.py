"""The supervision of a server on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from types import ModuleType

import pytest

from inflight.processes import ProcessId, stat_fields
from inflight.testing.machine import orchestrated_ranks, supervised_server
from tests.tiers import examples, with_all

from .mutations import NUM_SEEDS, Mutation, every
from .mutations_of_supervision import MUTATIONS_OF_SUPERVISION


def test_lost_processes_are_started_again_and_none_is_left() -> None:
    faults: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(examples(100, all=400)):
        report = supervised_server.run(seed)
        faults += report.faults
        endings += report.endings
    assert faults.keys() == supervised_server.FAULTS.keys()
    assert endings.keys() == {"asked to end", "given up", "killed", "not started"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_always_does_the_same(seed: int) -> None:
    assert supervised_server.run(seed) == supervised_server.run(seed)


@pytest.mark.parametrize(
    "mutation",
    with_all(MUTATIONS_OF_SUPERVISION, every(4, MUTATIONS_OF_SUPERVISION)),
    ids=lambda each: each.name,
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(supervised_server.run), f"{NUM_SEEDS} seeds and nothing noticed"


@pytest.mark.parametrize("machine", [supervised_server, orchestrated_ranks], ids=lambda each: each.__name__)
def test_a_thread_beside_the_machine_keeps_the_real_kernel(machine: ModuleType) -> None:
    """Servers that other tests started are watched by threads of this process."""
    wrong: list[object] = []
    over = threading.Event()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running = ProcessId.of(child.pid)
    assert running is not None

    def watch() -> None:
        try:
            while not over.is_set():
                if running.wait(0.001) or stat_fields(child.pid) is None:
                    wrong.append("ended")
        except Exception as error:
            wrong.append(error)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for seed in range(5):
            machine.run(seed)
    finally:
        over.set()
        watching.join()
        child.communicate(b"\n")
    assert not wrong
