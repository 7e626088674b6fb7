"""Random seeds through the simulated server, on a device whose caches are linear."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.engine.tensorrt.row_residency import RowResidency
from inflight.testing.simulation import simulated_server
from inflight.testing.simulation.rows_device import RowsDevice
from inflight.testing.simulation.scenario import (
    Scenario,
    draw,
    draw_with_a_bad_device,
    draw_with_failing_rows,
)
from inflight.testing.simulation.simulated_server import run
from tests.tiers import examples, with_all

SEEDS = range(examples(fast=100, all=200))


@pytest.fixture(autouse=True)
def with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_server, "SimulatedDevice", RowsDevice)
    monkeypatch.setattr(RowsDevice, "num_loads", 0)
    monkeypatch.setattr(RowsDevice, "num_spared", 0)


def scenarios(seed: int) -> list[Scenario]:
    ahead = draw(seed).ahead()
    kinds = [ahead.in_turn(), ahead.without_host_waits(), draw_with_failing_rows(seed)]
    return [kinds[seed % 3], draw_with_a_bad_device(seed)] if seed % 5 == 0 else [kinds[seed % 3]]


def test_rows_have_the_content_of_their_blocks() -> None:
    num_failed = 0
    for seed in SEEDS:
        for scenario in scenarios(seed):
            num_failed += run(scenario).num_failed_iterations
    assert num_failed > len(SEEDS) // 2
    assert RowsDevice.num_loads > 5 * len(SEEDS) and RowsDevice.num_spared > len(SEEDS) // 2


def copies_unnoticed(patch: pytest.MonkeyPatch) -> None:
    renew = RowResidency._renew

    def without_targets(self: RowResidency, block_ids: int | np.ndarray) -> None:
        if not isinstance(block_ids, int):
            renew(self, block_ids)

    patch.setattr(RowResidency, "_renew", without_targets)


def writes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    renew = RowResidency._renew

    def without_writes(self: RowResidency, block_ids: int | np.ndarray) -> None:
        if isinstance(block_ids, int):
            renew(self, block_ids)

    patch.setattr(RowResidency, "_renew", without_writes)


def versions_ignored(patch: pytest.MonkeyPatch) -> None:
    renew = RowResidency._renew

    def backwards(self: RowResidency, block_ids: int | np.ndarray) -> None:
        renew(self, block_ids)
        self._current[block_ids] -= 1

    patch.setattr(RowResidency, "_renew", backwards)


def reads_unnoticed(patch: pytest.MonkeyPatch) -> None:
    prepare = RowResidency._prepare

    def without_note(self: RowResidency, slot: int, num_tokens: int):
        changes = prepare(self, slot, num_tokens)
        self._was_read[:] = False
        return changes

    patch.setattr(RowResidency, "_prepare", without_note)


def writers_unnoticed(patch: pytest.MonkeyPatch) -> None:
    write = RowResidency._write

    def as_its_own(self: RowResidency, slot: int, begin: int, end: int) -> None:
        self._writers[self._tables[slot, begin // self._size : -(-end // self._size)]] = slot
        write(self, slot, begin, end)

    patch.setattr(RowResidency, "_write", as_its_own)


def rows_kept_as_they_were(patch: pytest.MonkeyPatch) -> None:
    prepare = RowResidency._prepare

    def without_clearing(self: RowResidency, slot: int, num_tokens: int):
        self._untouched.discard(slot)
        return prepare(self, slot, num_tokens)

    patch.setattr(RowResidency, "_prepare", without_clearing)


def moves_unnoticed(patch: pytest.MonkeyPatch) -> None:
    change = RowResidency._change_tables

    def none_moved(self: RowResidency, batch) -> set[int]:
        change(self, batch)
        return set()

    patch.setattr(RowResidency, "_change_tables", none_moved)


def failures_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowResidency, "forget", lambda self, batch: None)


@pytest.mark.parametrize(
    "plant",
    with_all(
        [
            copies_unnoticed,
            writes_unnoticed,
            versions_ignored,
            reads_unnoticed,
            writers_unnoticed,
            rows_kept_as_they_were,
            moves_unnoticed,
            failures_unnoticed,
        ],
        [copies_unnoticed, rows_kept_as_they_were, failures_unnoticed],
    ),
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_detected(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def notices(seed: int) -> bool:
        try:
            for scenario in [*scenarios(seed), draw_with_a_bad_device(seed)]:
                run(scenario)
        except (AssertionError, LookupError, ValueError):
            return True
        return False

    assert any(map(notices, SEEDS)), f"{len(SEEDS)} seeds and nothing noticed"
