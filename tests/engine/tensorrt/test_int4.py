"""Checkpoints in 4 bits, whose matrices stay quantized in networks and plans."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inflight.engine.tensorrt.build import BuildOptions, build_engine
from inflight.engine.tensorrt.sidecar import PlanTensor
from tests.engine.tensorrt.in_flight import (
    SIZES,
    Meeting,
    Runner,
    Text,
    build,
    largest_error,
    relative_error,
    run,
    texts_of,
)
from tests.engine.tensorrt.test_networks import BOUND, EXACT
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo
from tests.tiers import with_all

IN_4_BITS = [
    "ct-int4",
    "ct-int4-channel",
    "ct-int4-zeros",
    "ct-int4-act-order",
    "awq",
    "awq-one-group",
    "gptq",
    "gptq-one-group",
    "gptq-zeros",
    "gptq-act-order",
    "gptq-v2",
    "gptq-any-order",
]


@pytest.mark.parametrize("name", with_all(IN_4_BITS, ["awq", "gptq-act-order"]))
def test_logits_equal_those_of_dequantized_weights(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS[name])
    (engine,) = build(model.folder, tmp_path / "engine")
    settings = engine.sidecar.settings
    assert (settings.weight_dtype, settings.dtype) == ("int4", "float32")
    levels = [node for node in engine.layers.nodes if node.kind == "DEQUANTIZE"]
    assert len(levels) == (2 * 3 if name == "gptq-any-order" else 4 * 3)  # of three layers
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert largest_error(model, texts) < EXACT
    assert largest_error(zoo["llama-gqa"], texts) > 10 * EXACT


@pytest.mark.parametrize("name", with_all(["ct-int4", "awq"], ["awq"]))
def test_error_in_half_precision_is_bounded(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS[name], dtype="float16")
    (engine,) = build(model.folder, tmp_path / "engine")
    assert engine.sidecar.settings.dtype == "float16"
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert 0 < relative_error(model, texts) < BOUND["float16"]


def test_experts_stay_in_4_bits_and_give_the_dequantized_logits(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["mixtral"], tmp_path / "checkpoint", FORMATS["awq"], skipped=(".gate",))
    (engine,) = build(model.folder, tmp_path / "engine")
    assert sum(node.kind == "DEQUANTIZE" for node in engine.layers.nodes) == 4 * 3
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert largest_error(model, texts) < EXACT


def test_weights_that_are_inputs_stay_packed_in_4_bits(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS["gptq-v2"])
    (engine,) = build(model.folder, tmp_path / "engine", weights="inputs")
    name = "weight.layers.1.qkv.weight"
    assert engine.sidecar.layers.tensor(name) == PlanTensor(name, "int4", (96, 64))
    assert engine.weights[name].dtype is torch.uint8
    assert engine.weights[name].shape == (96, 32)
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert largest_error(model, texts) < EXACT


@pytest.mark.parametrize("name", with_all(["awq", "gptq-act-order"], ["gptq-act-order"]))
def test_ranks_split_4_bit_weights(
    zoo: Zoo, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With act-order a rank may have only a few inputs of some groups; its weights are then unpacked."""
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS[name])
    with caplog.at_level(logging.WARNING):
        engines = build(model.folder, tmp_path / "engine", tensor_parallel_size=2)
    assert ("are unpacked" in caplog.text) == (name == "gptq-act-order")
    meeting = Meeting(2)

    def logits(rank: int) -> list[Text]:
        texts = texts_of(model)
        run(Runner(engines[rank], meeting.rank(rank)), texts)
        return texts

    with ThreadPoolExecutor(2) as pool:
        for texts in pool.map(logits, range(2)):
            assert largest_error(model, texts) < EXACT


def test_another_dtype_unpacks_weights_of_4_bits(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS["awq"])
    (engine,) = build(model.folder, tmp_path / "engine", dtype="float32")
    assert not any(node.kind == "DEQUANTIZE" for node in engine.layers.nodes)
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert largest_error(model, texts) < EXACT


@pytest.mark.parametrize(
    ("name", "weights"),
    with_all([("awq", "constants"), ("gptq-act-order", "inputs")], [("gptq-act-order", "inputs")]),
)
def test_plans_of_4_bit_checkpoints_build_with_int4_weights(
    zoo: Zoo, tmp_path: Path, name: str, weights: str
) -> None:
    model = write(zoo["llama-heads-16"], tmp_path / "checkpoint", FORMATS[name], dtype="float16")
    (sidecar,) = build_engine(model.folder, tmp_path / "engine", BuildOptions(**SIZES, weights=weights))
    assert sidecar.settings.weight_dtype == "int4"
    assert (tmp_path / "engine" / sidecar.layers.file.name).stat().st_size > 100_000
