"""`scripts/bench lora` summarizes its turns, and makes an adapter for every linear layer."""

from __future__ import annotations

import pytest

from benchmarks.lora import Turn, random_adapter, summarize
from inflight.adapters.lora_modules import module_sizes
from inflight.core.request.adapter import LoraWeights
from inflight.engine.low_rank import low_rank_layers
from inflight.models import read_model_description
from inflight.models.sharding import Part
from inflight.testing.make_model import make_model


@pytest.mark.smoke
def test_ratios_are_of_tokens_per_second():
    plain = [Turn(wall, 2 * wall) for wall in (8.0, 9.0, 40.0)]
    adapted = [Turn(wall, 20.0) for wall in (10.0, 12.0, 40.0)]
    figures = summarize(adapted, plain, tokens=32)
    assert figures["with_tokens_per_s"] == 2666.7 and figures["without_tokens_per_s"] == 3555.6
    assert figures["ratio"] == 0.8 and figures["ratio_of_fastest"] == 0.8
    assert figures["ratio_of_processor_time"] == 0.9


def test_every_linear_layer_is_adapted(tmp_path):
    decoder = read_model_description(make_model(tmp_path)).decoder
    adapter = random_adapter(decoder, 16)
    assert isinstance(adapter.weights, LoraWeights) and adapter.rank == 16
    layers = low_rank_layers(adapter.weights, decoder, Part.whole(decoder))
    assert len(layers) == decoder.num_layers
    for modules in layers.values():
        assert len(modules) == 7
        for module, low_rank in modules.items():
            size = module_sizes(decoder, 0)[module]
            assert low_rank.a.shape == (16, size.inner) and low_rank.b.shape == (size.outer, 16)
            assert low_rank.a.any() and low_rank.b.any()
