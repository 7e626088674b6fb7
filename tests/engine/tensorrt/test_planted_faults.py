"""Proof that the tests of plans would notice: one mistake at a time, between the batcher and a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.engine.tensorrt import decoder as decoder_module
from inflight.engine.tensorrt.plan_rows import BatchPart, PlanRows
from inflight.engine.tensorrt.row_cache import RowCache
from inflight.engine.tensorrt.row_residency import RowResidency
from inflight.engine.tensorrt.runtime import LoadedPlan
from tests.engine.driver import Driver
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.serving import config_of, serve
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import load
from tests.engine.tensorrt.test_plan_features import record
from tests.models.zoo import Zoo

Patch = pytest.MonkeyPatch
Change = Callable[[PlanRows], PlanRows]


def rows_changed(change: Change) -> Callable[[Patch], None]:
    """A mistake in what a plan is told of its rows."""

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
    """TensorRT would write where nobody reads, if it did not refuse."""
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
    """What a row holds is taken for what its blocks hold."""
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
    """The second piece of a chunk has the first one's chunk."""
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


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(zoo: Zoo, plans: Plans, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what `test_served_plans.py` asserts, of fewer requests."""
    model = zoo["llama-gqa"]
    FAULTS[name](monkeypatch)
    requests = some_of_everything(model)[:6]
    config = config_of("chunked", max_beam_width=3)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        served = serve(load(plans(model, max_num_tokens=20), num_blocks=60), config, requests)
        assert_as_transformers(model, served, requests)


def fillers_at_the_beginning(patch: Patch) -> None:
    place = decoder_module.place_filled_rows

    def first(slots: torch.Tensor, positions: torch.Tensor, null: int, num_slots: int, last: int) -> Any:
        return place(slots, positions, null, num_slots, 0)

    patch.setattr(decoder_module, "place_filled_rows", first)


def fillers_in_busy_slots(patch: Patch) -> None:
    place = decoder_module.place_filled_rows

    def busy(slots: torch.Tensor, positions: torch.Tensor, null: int, num_slots: int, last: int) -> Any:
        found = place(slots, positions, null, num_slots, last)
        return replace(
            found, slots=torch.where(slots == null, slots[0].clamp(max=num_slots - 1), found.slots)
        )

    patch.setattr(decoder_module, "place_filled_rows", busy)


@pytest.mark.parametrize("plant", [fillers_at_the_beginning, fillers_in_busy_slots])
def test_a_fault_in_recordings_is_noticed(
    zoo: Zoo, plans: Plans, plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what `test_plan_features.py` asserts: rows of slots that rest for an iteration are what they were."""
    model = zoo["llama-gqa"]
    expected = replay_resting(load(plans(model), 60, max_num_sequences=6), model)
    plant(monkeypatch)
    engine = load(plans(model), 60, max_num_sequences=6)
    try:
        record(engine, lambda operations: operations() or operations)
        found = replay_resting(engine, model)
    except (RuntimeError, ValueError, IndexError):
        return
    assert found != expected


def replay_resting(engine: Any, model: Any) -> list[list[int]]:
    """Five sequences, of which three generate while two rest, in turn."""
    driver = Driver(engine)
    rows = [driver.start(model.prompt(6 + number, number)) for number in range(5)]
    driver.step({row: len(row.tokens) for row in rows})
    for number in range(10):
        driver.step(generation=[rows[(number + other) % 5] for other in range(3)])
    return [row.generated for row in rows]


def test_sequences_that_rest_are_left_alone_by_recordings(zoo: Zoo, plans: Plans) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model), 60, max_num_sequences=6)
    record(engine, lambda operations: operations() or operations)
    assert replay_resting(engine, model) == replay_resting(load(plans(model), 60, max_num_sequences=6), model)
