"""Checks that the tests of recurrent layers detect faults: one fault at a time, in the states of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.engine.layers import decoder
from inflight.engine.recurrent.states import RecurrentStates
from inflight.models.recurrent import GatedDelta, RecurrentWeights
from tests.engine.driver import alone, load_engine
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.kernels import by_default_and
from tests.engine.serving import config_of, load, serve
from tests.engine.test_families import TOLERANCE
from tests.models.zoo import Zoo
from tests.tiers import with_all

Patch = pytest.MonkeyPatch


def generation_in_another_slot(patch: Patch) -> None:
    """Plant a fault: generated tokens continue the state of the next row's slot."""
    divide = RecurrentStates._divide

    def rolled(self: RecurrentStates, *arguments: Any) -> Any:
        metadata = divide(self, *arguments)
        return replace(metadata, generation_slots=metadata.generation_slots.roll(1))

    patch.setattr(RecurrentStates, "_divide", rolled)


def chunks_in_another_slot(patch: Patch) -> None:
    """Plant a fault: chunks of prompts continue the state of another slot."""
    divide = RecurrentStates._divide

    def moved(self: RecurrentStates, *arguments: Any) -> Any:
        metadata = divide(self, *arguments)
        segments = tuple(replace(each, slot=each.slot ^ 1) for each in metadata.segments)
        return replace(metadata, segments=segments)

    patch.setattr(RecurrentStates, "_divide", moved)


def states_of_ended_sequences(patch: Patch) -> None:
    """Plant a fault: a new sequence begins with the state that its slot had."""
    memory = torch.Tensor.index_fill_

    def unchanged(self: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
        return self if dim == 1 and value == 0 else memory(self, dim, index, value)

    patch.setattr(torch.Tensor, "index_fill_", unchanged)


def other_snapshots(patch: Patch) -> None:
    """Plant a fault: a reused prefix begins with another snapshot than its own."""
    apply = RecurrentStates.apply

    def stale(self: RecurrentStates, batch: Any) -> None:
        starts = [
            replace(start, snapshot=start.snapshot ^ 1) if start.snapshot >= 0 else start
            for start in batch.starts
        ]
        apply(self, replace(batch, starts=starts))

    patch.setattr(RecurrentStates, "apply", stale)


def beams_that_keep_their_states(patch: Patch) -> None:
    """Plant a fault: a beam that continues another one keeps its own state."""
    apply = RecurrentStates.apply
    patch.setattr(RecurrentStates, "apply", lambda self, batch: apply(self, replace(batch, moves=())))


def one_draft_too_many(patch: Patch) -> None:
    """Plant a fault: the first rejected draft token is applied to the state too."""
    keep = RecurrentStates.keep_drafts

    def more(self: RecurrentStates, slot: int, advance: Callable[[int], None]) -> None:
        keep(self, slot, lambda num_accepted: advance(num_accepted + 1))

    patch.setattr(RecurrentStates, "keep_drafts", more)


def rejected_drafts(patch: Patch) -> None:
    """Plant a fault: accepted draft tokens are not applied to the state."""
    patch.setattr(RecurrentStates, "accept", lambda *arguments, **keywords: None)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "generation in another slot": generation_in_another_slot,
    "chunks in another slot": chunks_in_another_slot,
    "states of ended sequences": states_of_ended_sequences,
    "other snapshots": other_snapshots,
    "beams that keep their states": beams_that_keep_their_states,
    "one draft too many": one_draft_too_many,
    "rejected drafts": rejected_drafts,
}


def test_without_a_fault_the_results_are_those_of_transformers(zoo: Zoo) -> None:
    model = zoo["qwen3.5"]
    requests = some_of_everything(model, longest=12)
    engine = load(model.folder, num_blocks=60, max_num_sequences=6, recurrent_state_snapshots=8)
    for _ in range(2):
        assert_as_transformers(model, serve(engine, config_of("chunked"), requests), requests)


FAST = [("generation in another slot", None), ("other snapshots", None), ("one draft too many", "torch")]


@pytest.mark.parametrize("case", with_all(["qwen3.5", "granite-hybrid", "lfm2"], ["qwen3.5"]))
@pytest.mark.parametrize(("name", "kernels"), with_all(by_default_and(FAULTS, list(FAULTS)), FAST))
def test_a_fault_in_the_states_is_detected(
    zoo: Zoo, case: str, name: str, kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of every kind, served twice so that prefixes are reused, differ from transformers' results."""
    FAULTS[name](monkeypatch)
    model = zoo[case]
    requests = some_of_everything(model, longest=12)
    engine = load(
        model.folder, num_blocks=60, max_num_sequences=6, kernels=kernels, recurrent_state_snapshots=8
    )
    with pytest.raises(AssertionError):
        for _ in range(2):
            assert_as_transformers(model, serve(engine, config_of("chunked"), requests), requests)


def slower_decays(config: GatedDelta, weights: RecurrentWeights) -> tuple[GatedDelta, RecurrentWeights]:
    """Plant a fault: logarithms of decays are wrong by a thousandth."""
    assert weights.decay is not None
    return config, replace(weights, decay=weights.decay * 0.999)


def shifted_convolution(config: GatedDelta, weights: RecurrentWeights) -> tuple[GatedDelta, RecurrentWeights]:
    """Plant a fault: the convolution's weights are those of the next token."""
    return config, replace(weights, conv=weights.conv.roll(1, dims=1))


def larger_epsilon(config: GatedDelta, weights: RecurrentWeights) -> tuple[GatedDelta, RecurrentWeights]:
    """Plant a fault: the epsilon of the norm after linear attention is wrong by a tenth."""
    return replace(config, norm_eps=1.1 * config.norm_eps), weights


@pytest.mark.parametrize("change", [slower_decays, shifted_convolution, larger_epsilon])
@pytest.mark.parametrize(
    "case", with_all(["qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid"], ["qwen3.5"])
)
def test_a_small_fault_exceeds_the_bound_of_logits_by_far(
    zoo: Zoo, case: str, change: Callable[..., Any], monkeypatch: Patch
) -> None:
    """The bound is meaningful only if random models neither hide errors nor enlarge rounding errors up to it."""
    make = decoder.make_mixer
    monkeypatch.setattr(
        decoder, "make_mixer", lambda config, weights, *others: make(*change(config, weights), *others)
    )
    model = zoo[case]
    prompt = model.prompt(27)
    row = alone(load_engine(model.folder, kernels="torch"), prompt, 40)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    assert (torch.stack(row.logits) - expected).abs().max() > 30 * TOLERANCE
