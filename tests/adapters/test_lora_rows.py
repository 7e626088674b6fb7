"""Checks of adapters' tensors against the model, with TensorRT-LLM's messages, and the digest of adapters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from inflight.adapters.lora_modules import SPLIT_MODULES, Module, module_sizes
from inflight.adapters.lora_rows import check_adapter, largest_adapter_bytes
from inflight.adapters.lora_tensors import read_lora_tensors
from inflight.core.request.adapter import LoraWeights
from inflight.errors import InvalidArgument
from inflight.models.decoder_config import DecoderConfig
from inflight.models.registry import read_model_description
from tests.adapters.factories import make_weights
from tests.models.zoo import Zoo

Q, K, DOWN = Module.ATTN_Q, Module.ATTN_K, Module.MLP_4H_TO_H
ROWS = [(Q, 0, 4), (K, 0, 2), (DOWN, 0, 3), (Q, 2, 1)]


@pytest.fixture(scope="module")
def decoder(zoo: Zoo) -> DecoderConfig:
    return read_model_description(zoo["llama-gqa"].folder).decoder


def error_of(decoder: DecoderConfig, weights: LoraWeights, max_rank: int = 8) -> str:
    with pytest.raises(InvalidArgument) as raised:
        check_adapter(weights, decoder, max_rank)
    return str(raised.value)


def made_of(rows: list[list[int]], width: int = 2000, dtype: Any = np.float32) -> LoraWeights:
    return read_lora_tensors(np.zeros((1, len(rows), width), dtype), np.array([rows], np.int32))


def test_rank_and_digest_do_not_depend_on_order_and_padding(decoder: DecoderConfig) -> None:
    one = check_adapter(make_weights(decoder, ROWS), decoder, 8)
    assert one.rank == 4
    assert [row[:2] for row in one.weights.config] == [(1, 0), (2, 0), (6, 0), (1, 2)]
    for changed in (
        make_weights(decoder, ROWS[::-1]),
        make_weights(decoder, ROWS, padding=100),
        make_weights(decoder, ROWS, columns=3),
    ):
        assert check_adapter(changed, decoder, 8) == one
    for different in (
        make_weights(decoder, ROWS, seed=1),
        make_weights(decoder, ROWS[:3]),
        make_weights(decoder, [*ROWS[:3], (Q, 1, 1)]),
        make_weights(decoder, [(Module.ATTN_V, *row[1:]) if row[0] is K else row for row in ROWS]),
        make_weights(decoder, ROWS, dtype=np.float16),
    ):
        assert check_adapter(different, decoder, 8).digest != one.digest


def test_one_changed_number_changes_the_digest(decoder: DecoderConfig) -> None:
    tensors = np.ones((1, 1, 2 * (64 + 64)), np.float32), np.array([[[Q, 0, 2]]], np.int32)
    one = check_adapter(read_lora_tensors(*tensors), decoder, 8)
    tensors[0][0, 0, -1] = 2
    assert check_adapter(read_lora_tensors(*tensors), decoder, 8).digest != one.digest


def test_the_digest_depends_on_module_and_layer(decoder: DecoderConfig) -> None:
    numbers = np.ones((1, 1, 256), np.float32)
    places = [(Q, 0), (Q, 1), (Module.ATTN_DENSE, 0)]  # of equal sizes
    made = [read_lora_tensors(numbers, np.array([[[*place, 2]]], np.int32)) for place in places]
    half = read_lora_tensors(numbers.astype(np.float16), np.array([[[Q, 0, 2]]], np.int32))
    assert len({check_adapter(each, decoder, 8).digest for each in (*made, half)}) == 4


def test_stored_weights_are_a_copy(decoder: DecoderConfig) -> None:
    weights, config = np.ones((1, 1, 128), np.float32), np.array([[[Q, 0, 1]]], np.int32)
    checked = check_adapter(read_lora_tensors(weights, config), decoder, 8)
    weights[:] = 5
    assert set(np.frombuffer(checked.weights.weights.buffer.data, np.float32)) == {1.0}


def test_padding_is_not_stored(decoder: DecoderConfig) -> None:
    checked = check_adapter(make_weights(decoder, ROWS, padding=999), decoder, 8)
    sizes = module_sizes(decoder, 0)
    widest = max(rank * (sizes[module].inner + sizes[module].outer) for module, _, rank in ROWS)
    assert checked.weights.weights.shape == (4, widest)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[1, 3, 4, 0]], "Expected layerId to be in the range [0, numModelLayers): row 0 of lora_config has"),
        ([[1, 0, 4, 0], [1, -1, 4, 0]], "Expected layerId to be in the range [0, numModelLayers): row 1"),
        ([[1, 0, 0, 0]], "Expected adapterSize to be > 0: row 0 of lora_config has adapter_size 0"),
        ([[1, 0, -2, 0]], "Expected adapterSize to be > 0"),
        ([[8, 0, 4, 0]], "lora module cross_attn_qkv not enabled for this model: row 0 of lora_config has"),
        ([[99, 0, 4, 0]], "lora module 99 not enabled for this model"),
        ([[-1, 0, 4, 0]], "lora module -1 not enabled for this model"),
        ([[6, 0, 8, 0], [1, 0, 8, 0]], ""),
        ([[1, 0, 9, 0]], "Invalid low_rank (9). low_rank must be smaller than mMaxLowRank (8): row 0"),
        ([[1, 0, 4, 2]], "row 0 of lora_config has is_dora 2, expected 0 or 1"),
        ([[1, 0, 4, 0], [1, 1, 4, 0], [1, 0, 2, 0]], "rows 0 and 2 of lora_config are both of attn_q of layer 0"),
        ([[0, 1, 4, 0], [3, 1, 4, 0]], "rows 0 and 1 of lora_config are of attn_qkv and of attn_v, which"),
        ([[5, 1, 2, 0], [18, 1, 2, 0]], "rows 1 and 0 of lora_config are of mlp_gate_up and of mlp_h_to_4h"),
        ([[0, 1, 4, 0], [3, 0, 4, 0]], ""),
        ([], "lora_config has no rows"),
    ],
)  # fmt: skip
def test_errors_name_rows_that_do_not_fit_the_model(
    decoder: DecoderConfig, rows: list[list[int]], says: str
) -> None:
    weights = made_of(rows) if rows else LoraWeights(made_of([[1, 0, 1]]).weights, ())
    if says:
        assert error_of(decoder, weights).startswith(says)
    else:
        check_adapter(weights, decoder, 8)


def test_a_row_that_is_too_short_is_refused_with_its_length(decoder: DecoderConfig) -> None:
    says = (
        "lora_weights has to few values for mlp_4h_to_h: row 0 of lora_config needs 4 * (96 + 64) = 640, and"
    )
    assert error_of(decoder, made_of([[6, 0, 4, 0]], 639)).startswith(says)
    check_adapter(made_of([[6, 0, 4, 0]], 640), decoder, 8)
    says = (
        "lora_weights has to few values for mlp_4h_to_h: row 0 of lora_config needs 4 * (96 + 64) + 64 = 704"
    )
    assert error_of(decoder, made_of([[6, 0, 4, 1]], 703)).startswith(says)
    check_adapter(made_of([[6, 0, 4, 1]], 704), decoder, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_infinite_numbers_and_nan_are_refused(
    decoder: DecoderConfig, dtype: torch.dtype, number: float
) -> None:
    numbers = torch.full((1, 1, 130), torch.finfo(dtype).max, dtype=dtype)
    numbers[0, 0, -2:] = -0.0
    config = np.array([[[Q, 0, 1]]], np.int32)
    name = str(dtype).removeprefix("torch.")

    def read() -> LoraWeights:
        bits = numbers.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
        return read_lora_tensors(bits, config, name)

    assert check_adapter(read(), decoder, 8).weights.weights.dtype == name
    numbers[0, 0, 7] = number
    assert "(attn_q of layer 0) has numbers that are infinite or NaN" in error_of(decoder, read())


def test_nonzero_padding_is_refused(decoder: DecoderConfig) -> None:
    """For example, a fused projection under the module id of its first part has numbers where padding is
    expected."""
    weights, config = np.zeros((1, 1, 1000), np.float32), np.array([[[Q, 0, 1]]], np.int32)
    weights[0, 0, 128] = 1e-30
    assert "has 128 numbers by its adapter_size 1, followed by numbers other than 0" in error_of(
        decoder, read_lora_tensors(weights, config)
    )


@pytest.mark.parametrize(
    ("weights", "config", "says"),
    [
        (None, np.zeros((1, 1, 4), np.int32), "lora_weights is missing"),
        (np.zeros((1, 1, 9), np.float32), None, "lora_config is missing"),
        (np.zeros((1, 9), np.float32), np.zeros((1, 1, 4), np.int32), "Invalid shape for lora_weights tensor"),
        (np.zeros((1, 1, 9), np.float32), np.zeros((1, 4), np.int32), "Invalid shape for lora_keys tensor"),
        (np.zeros((2, 1, 9), np.float32), np.zeros((2, 1, 4), np.int32), "Expected batch dimension to be 1"),
        (np.zeros((1, 2, 9), np.float32), np.zeros((1, 1, 4), np.int32),
            "Expected dim1 lora_weights and lora_keys to have the same size: lora_weights has 2 rows"),
        (np.zeros((1, 1, 9), np.float32), np.zeros((1, 1, 5), np.int32),
            "Expected dim2 of lora_keys to have a size in [3, 4]"),
        (np.zeros((1, 1, 9), np.float32), np.zeros((1, 1, 2), np.int32),
            "Expected dim2 of lora_keys to have a size in [3, 4]"),
        (np.zeros((1, 1, 9), np.float32), np.zeros((1, 1, 4), np.float32),
            "Expected  lora keys to have TYPE_INT32 but was float32"),
        (np.zeros((1, 1, 9), np.float64), np.zeros((1, 1, 4), np.int32), "lora_weights has numbers of"),
    ],
)  # fmt: skip
def test_shape_errors_have_the_messages_of_tensorrt_llm(weights: Any, config: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_lora_tensors(weights, config)
    assert says in str(raised.value)
    if weights is None or config is None:
        assert "Request for LoRA inference must have both lora_weights and lora_keys" in str(raised.value)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2-inner"])
def test_no_adapter_exceeds_largest_adapter_bytes(zoo: Zoo, case: str) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    modules = [each for each in SPLIT_MODULES if each in module_sizes(decoder, 0)]
    rows = [(module, layer, 8) for layer in range(decoder.num_layers) for module in modules]
    checked = check_adapter(make_weights(decoder, rows, is_dora=True), decoder, 8)
    assert len(checked.weights.weights.buffer) == largest_adapter_bytes(decoder, 8, 4)


@pytest.mark.parametrize(
    ("case", "module", "where", "enabled"),
    [
        ("qwen3.5", Module.ATTN_K, "layer 0, which is recurrent", r"mamba_in_proj \(22\), \w+ \(110\)"),
        ("nemotron-h", Module.ATTN_K, "layer 0, which is recurrent", r"\w+ \(22\), mamba_out_proj \(23\)$"),
        ("mixtral", Module.MLP_GATE, "layer 0, which has experts", r"attn_q \(1\), attn_k"),
        (
            "deepseek-v3",
            Module.ATTN_K,
            "this model",
            r"attn_q_a \(100\), attn_q_b \(101\), attn_kv_a \(102\)",
        ),
    ],
)
def test_a_module_that_a_layer_lacks_is_refused(
    zoo: Zoo, case: str, module: Module, where: str, enabled: str
) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    message = rf"{module.text} not enabled for {where}: row 0 .* expected one of {enabled}"
    assert re.search(message, error_of(decoder, made_of([[int(module), 0, 4, 0]])))


def test_ids_of_shared_experts_are_those_of_an_mlp(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["qwen2-moe"].folder).decoder
    layer = next(layer for layer in range(decoder.num_layers) if decoder.has_experts(layer))
    rows = [[5, layer, 4, 0], [6, layer, 4, 0], [7, layer, 4, 0]]
    renamed = [[19, layer, 4, 0], [20, layer, 4, 0], [21, layer, 4, 0]]
    digests = {check_adapter(made_of(each, 9000), decoder, 8).digest for each in (rows, renamed)}
    assert len(digests) == 1
