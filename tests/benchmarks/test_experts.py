"""`scripts/bench experts` runs, counts the right weights, and computes its figures from times."""

from __future__ import annotations

import pytest

from benchmarks.experts import FAMILY, SHAPE, Iterations, bytes_read, generate, summarize
from benchmarks.measuring.report import Bandwidth
from benchmarks.measuring.setup import ModelShape
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.models import read_model_description
from inflight.testing.make_model import Shape, make_model, num_weights
from tests.engine.driver import load_engine
from tests.engine.kernels import needs_native

SMALL = Shape(2, 64, 4, 2, 32, 300, 256, 1e4, experts=6, experts_per_token=3)
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
EXPERT = 3 * 64 * 32


def test_only_the_weights_of_read_experts_are_counted(tmp_path):
    config = read_model_description(make_model(tmp_path, FAMILY, SMALL)).decoder
    shape = ModelShape.of(config)
    assert shape.layer_weights == 2 * (ATTENTION + 6 * 64 + 3 * EXPERT)
    assert shape.num_weights == 2 * (ATTENTION + 6 * 64 + 6 * EXPERT) + 300 * 64
    assert bytes_read(config, "bfloat16", 3) == 2 * (shape.layer_weights + 300 * 64)
    assert bytes_read(config, "int8", 5.5) == shape.layer_weights + 300 * 64 + 2 * 2.5 * EXPERT


@pytest.mark.smoke
def test_the_share_is_relative_to_the_memory_bandwidth(tmp_path):
    config = read_model_description(make_model(tmp_path, FAMILY, SMALL)).decoder
    run = Iterations([0.5, 0.1, 0.2], routing_s=0.08, experts_read=3 * 2 * 4)
    figures = summarize(config, "bfloat16", 10, run, Bandwidth(4e-6, 6e-6))
    assert figures.tokens_per_s == 50 and figures.iteration_ms == 200 and figures.experts_read == 4
    assert figures.share == pytest.approx(bytes_read(config, "bfloat16", 4) / 0.2 / 5000)
    assert figures.router_share == pytest.approx(0.1)


def test_the_large_shape_has_a_billion_active_weights(tmp_path):
    config = read_model_description(make_model(tmp_path, FAMILY, SMALL)).decoder
    assert config.experts is not None and config.experts.is_normalized
    total = num_weights(FAMILY, SHAPE)
    idle = SHAPE.layers * (SHAPE.experts - SHAPE.experts_per_token) * 3 * SHAPE.hidden * SHAPE.ffn
    assert round(total / 1e9, 2) == 2.23 and round((total - idle) / 1e9, 2) == 1.02


@needs_native
def test_layers_count_the_experts_read(tmp_path):
    engine = load_engine(make_model(tmp_path, FAMILY, SMALL), kernels="native")
    decoder = engine.runner.decoder
    assert isinstance(decoder, NativeDecoder)
    one, many = (generate(engine, decoder, rows, 5, 4) for rows in (1, 6))
    assert len(one.seconds) == len(many.seconds) == 4
    assert one.experts_read == 4 * 2 * 3
    assert one.experts_read < many.experts_read <= 4 * 2 * 6
    assert 0 < one.routing_s < sum(one.seconds)
    engine.close()
