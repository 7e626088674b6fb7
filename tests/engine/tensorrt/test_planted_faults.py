"""Checks that the tests of plans detect faults: one fault at a time, between the batcher and a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.engine.packing import FixedRows
from inflight.engine.tensorrt import decoder as decoder_module
from inflight.engine.tensorrt.plan_rows import BatchPart, PlacedRows, PlanRows
from inflight.engine.tensorrt.row_cache import RowCache
from inflight.engine.tensorrt.row_residency import RowResidency
from inflight.engine.tensorrt.runtime import LoadedPlan
from tests.engine.driver import Driver
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.serving import config_of, serve
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import load
from tests.engine.tensorrt.test_plan_features import Replays, record
from tests.models.zoo import Zoo
from tests.tiers import with_all

Patch = pytest.MonkeyPatch
Change = Callable[[PlanRows], PlanRows]
Tokens = list[list[int]]


def rows_changed(change: Change) -> Callable[[Patch], None]:
    """Return a fault in the description of rows that a plan gets."""

    def plant(patch: Patch) -> None:
        lay_out = decoder_module.lay_out_for_plan
        patch.setattr(decoder_module, "lay_out_for_plan", lambda *arguments: change(lay_out(*arguments)))

    return plant


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    return rows_changed(lambda rows: replace(rows, **{name: change(getattr(rows, name)).int()}))


def rows_in_the_order_of_the_batch(rows: PlanRows) -> PlanRows:
    order = torch.arange(len(rows.slot_order), dtype=torch.int32)
    return replace(rows, slot_order=order, packed_order=order)


def two_layers_in_one_cache(patch: Patch) -> None:
    layer = RowCache.layer
    patch.setattr(RowCache, "layer", lambda self, index: layer(self, min(index, 1)))


def output_beside_its_input(patch: Patch) -> None:
    """Plant a fault: TensorRT would write to unused memory if it did not refuse this."""
    context = LoadedPlan._context

    def elsewhere(self: LoadedPlan, *arguments: Any) -> Any:
        found = context(self, *arguments)
        for name in list(self._aliased)[:1]:
            found.set_tensor_address(name, torch.empty_like(self._fixed[self._aliased[name]]).data_ptr())
        return found

    patch.setattr(LoadedPlan, "_context", elsewhere)


def rows_never_loaded(patch: Patch) -> None:
    patch.setattr(RowCache, "_load", lambda self, changes: None)


def stale_rows(patch: Patch) -> None:
    """Plant a fault: the first load of blocks into a row is left out."""
    prepare = RowResidency._prepare

    def believes(self: RowResidency, slot: int, num_tokens: int) -> Any:
        return [replace(change, loads=change.loads[1:]) for change in prepare(self, slot, num_tokens)]

    patch.setattr(RowResidency, "_prepare", believes)


def blocks_never_written(patch: Patch) -> None:
    patch.setattr(RowCache, "write_through", lambda self, *arguments: None)


def blocks_written_in_the_plans_order(patch: Patch) -> None:
    write = RowCache.write_through

    def sorted_(self: RowCache, slots: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> None:
        write(self, slots, positions, places[slots.argsort(stable=True)])

    patch.setattr(RowCache, "write_through", sorted_)


def blocks_loaded_from_the_next(patch: Patch) -> None:
    prepare = RowResidency._prepare

    def next_(self: RowResidency, slot: int, num_tokens: int) -> Any:
        for change in prepare(self, slot, num_tokens):
            loads = (replace(load, block_id=(load.block_id + 1) % 5) for load in change.loads)
            yield replace(change, loads=tuple(loads))

    patch.setattr(RowResidency, "_prepare", next_)


def parts_that_begin_anew(patch: Patch) -> None:
    """Plant a fault: the second piece of a chunk is computed as the first one's chunk."""
    cut = decoder_module.cut_batch

    def wrong(*arguments: Any) -> list[BatchPart]:
        parts = cut(*arguments)
        return [replace(part, chunks=parts[0].chunks) if len(parts) > 1 else part for part in parts]

    patch.setattr(decoder_module, "cut_batch", wrong)


def positions_from_zero(patch: Patch) -> None:
    run = LoadedPlan.run

    def shifted(self: LoadedPlan, inputs: Any, recording: Any = None) -> Any:
        if "position_ids" in inputs:
            inputs = inputs | {"position_ids": inputs["position_ids"] * 0}
        return run(self, inputs, recording)

    patch.setattr(LoadedPlan, "run", shifted)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "rows in the order of the batch": rows_changed(rows_in_the_order_of_the_batch),
    "hidden states in the plan's order": put("packed_order", lambda rows: rows.sort().values),
    "keys one position behind": put("write_indices", lambda rows: (rows + 1) * (rows > 0)),
    "generation reads a key less": put("gen_kv_lengths", lambda lengths: (lengths - 1).clamp(min=1)),
    "generation reads a key more": put("gen_kv_lengths", lambda lengths: lengths + (lengths > 1)),
    "queries of another slot": put("gen_q_gather", lambda rows: rows.roll(1)),
    "chunks of another slot": put("ctx_slots", lambda slots: (slots + 1) % 4),
    "chunks of another row": put("ctx_q_gather", lambda rows: rows.roll(1, 1)),
    "attention of another row": put("o_gather", lambda rows: rows.roll(1)),
    "two layers in one cache": two_layers_in_one_cache,
    "an output beside its input": output_beside_its_input,
    "rows never loaded": rows_never_loaded,
    "stale rows": stale_rows,
    "blocks never written": blocks_never_written,
    "blocks written in another order": blocks_written_in_the_plans_order,
    "another block loaded": blocks_loaded_from_the_next,
    "parts that begin anew": parts_that_begin_anew,
    "no positions": positions_from_zero,
}


@pytest.mark.parametrize(
    "name", with_all(FAULTS, ["keys one position behind", "stale rows", "blocks written in another order"])
)
def test_a_fault_is_detected(zoo: Zoo, plans: Plans, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertions of `test_served_plans.py`, with fewer requests, detect each planted fault."""
    model = zoo["llama-gqa"]
    FAULTS[name](monkeypatch)
    requests = some_of_everything(model, longest=12)[:6]
    config = config_of("chunked", max_beam_width=3)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        served = serve(load(plans(model, max_num_tokens=20), num_blocks=60), config, requests)
        assert_as_transformers(model, served, requests)


def fillers_in_resting_slots(patch: Patch) -> None:
    """Plant a fault: padding rows are written over sequences that are not in the batch."""
    fill_up = decoder_module.fill_up

    def idle(slots: torch.Tensor, positions: torch.Tensor, *others: Any) -> PlacedRows:
        found, null_slot, num_slots = fill_up(slots, positions, *others), others[1], others[2]
        is_filler = slots == null_slot
        own = slots[~is_filler].tolist()
        resting = next((slot for slot in range(num_slots) if slot not in own), 0)
        number = is_filler.cumsum(0) - 1
        return replace(
            found,
            slots=torch.where(is_filler, resting, slots),
            positions=torch.where(is_filler, number, positions),
        )

    patch.setattr(decoder_module, "fill_up", idle)


def fillers_that_generate(patch: Patch) -> None:
    """Plant a fault: padding rows count as generation rows of the slots that they are written to."""
    fill_up = decoder_module.fill_up

    def generate(slots: torch.Tensor, positions: torch.Tensor, fixed: FixedRows, *others: Any) -> PlacedRows:
        found = fill_up(slots, positions, fixed, *others)
        rows = torch.arange(len(slots))[slots == others[0]]
        together = torch.cat([found.fixed.generation_rows, rows])
        return replace(found, fixed=replace(found.fixed, generation_rows=together))

    patch.setattr(decoder_module, "fill_up", generate)


def empty_tiles_that_are_read(patch: Patch) -> None:
    """Plant a fault: an unused tile counts as one of the first row."""
    fill_up = decoder_module.fill_up

    def one_row(slots: torch.Tensor, positions: torch.Tensor, fixed: FixedRows, *others: Any) -> PlacedRows:
        tiles = fixed.tiles.clone()
        tiles[:, 1] = torch.where(tiles[:, 1] == 0, 1, tiles[:, 1])
        return fill_up(slots, positions, replace(fixed, tiles=tiles), *others)

    patch.setattr(decoder_module, "fill_up", one_row)


@pytest.fixture(scope="module")
def resting(zoo: Zoo, plans: Plans) -> Tokens:
    """The tokens of `replay_resting` without recordings and faults."""
    model = zoo["llama-gqa"]
    return replay_resting(load(plans(model), 60, max_num_sequences=6), model)


@pytest.mark.parametrize(
    "plant",
    [fillers_in_resting_slots, fillers_that_generate, empty_tiles_that_are_read],
)
def test_a_fault_in_recordings_is_detected(
    zoo: Zoo, plans: Plans, plant: Callable[[Patch], None], resting: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assertion of `test_plan_features.py` detects the fault: rows of slots that pause for an iteration
    are unchanged."""
    model = zoo["llama-gqa"]
    plant(monkeypatch)
    engine = load(plans(model), 60, max_num_sequences=6)
    try:
        record(engine, Replays())
        found = replay_resting(engine, model)
    except (RuntimeError, ValueError, IndexError):
        return
    assert found != resting


def replay_resting(engine: Any, model: Any) -> Tokens:
    """Run five sequences: three generate while two pause, in turn; some end, and others join in chunks."""
    driver = Driver(engine)
    rows, ended = [driver.start(model.prompt(6 + number, number)) for number in range(5)], []
    driver.step({row: len(row.tokens) for row in rows})
    for number in range(10):
        driver.step(generation=[rows[(number + other) % 5] for other in range(3)])
        if number % 3 == 0:
            ended.append(rows.pop())
            driver.release(ended[-1])
            rows.insert(0, driver.start(model.prompt(7 + number, 20 + number)))
            driver.step({rows[0]: 4}, rows[2:4])
            driver.step({rows[0]: 3 + number}, rows[2:3])
    return [row.generated for row in ended + rows]


def test_recordings_do_not_change_idle_sequences(zoo: Zoo, plans: Plans, resting: Tokens) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model), 60, max_num_sequences=6)
    record(engine, Replays())
    assert replay_resting(engine, model) == resting
