"""Keys and values in 8 bits: how they are rounded, and that results depend on nothing else.

The oracle is transformers' model in float64 whose attention rounds keys and values by the formulas written
here, and then attends as usual. In float32 a number near the border of two levels may be rounded to the other
one, so a few logits differ by up to a level; with a different rounding rule all logits would differ by that much.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from inflight.config import EngineConfig
from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.find import torch_paged_attention
from inflight.engine.attention.gathering import by_plain_products, gathering
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS
from inflight.engine.load import load_engine as load_model_engine
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import read_model_description
from tests.engine.driver import Driver, load_engine
from tests.engine.everything import some_of_everything
from tests.engine.fixed_rows import FixedRowsAttention
from tests.engine.kernels import needs_native
from tests.engine.paging import load_paged
from tests.engine.serving import WAYS, config_of, load, serve
from tests.engine.tape import Tape
from tests.engine.test_alone_and_together import logits_of, make_requests
from tests.engine.thread_ranks import ThreadRanks
from tests.models.zoo import Zoo, ZooModel
from tests.ranks.requests import CONFIG, ENGINE
from tests.tiers import with_all

CPU = torch.device("cpu")
NATIVE = pytest.param("native", marks=needs_native)
every_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])
by_both = pytest.mark.parametrize("kernels", [NATIVE, "torch"])
QUANTIZATIONS = {"int8": INT8_LEVELS, "fp8": FP8_LEVELS}

# ---------------------------------------------------------------------- the formulas

_STEPS_OF_FP8 = [step * 2.0**-9 for step in range(8)]  # e4m3: subnormal values, then all others
_STEPS_OF_FP8 += [(8 + step) * 2.0 ** (power - 10) for power in range(1, 16) for step in range(8)][:-1]
FP8_NUMBERS = torch.tensor(_STEPS_OF_FP8, dtype=torch.float64)


def naively(numbers: Tensor, kind: str) -> Tensor:
    """Return `numbers` [..., head_dim] rounded as in the cache, in their own dtype."""
    largest = numbers.abs().amax(-1, keepdim=True)
    if kind == "int8":
        scale = (largest / 127).clamp(min=1e-30)
        return (numbers / scale).round() * scale
    scale = (largest / 448).clamp(min=1e-30)
    sizes = (numbers / scale).abs()
    above = torch.searchsorted(FP8_NUMBERS.to(sizes.dtype), sizes).clamp(1, len(FP8_NUMBERS) - 1)
    low, high = (FP8_NUMBERS.to(sizes.dtype)[index] for index in (above - 1, above))
    is_low = (sizes - low < high - sizes) | ((sizes - low == high - sizes) & ((above - 1) % 2 == 0))
    return torch.where(is_low, low, high) * scale * numbers.sign()


def attending_to_rounded(kind: str) -> Callable[..., Any]:
    """Return an attention function of transformers."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        keys, values = (naively(each, kind).repeat_interleave(group, dim=1) for each in (key, value))
        places = torch.arange(query.shape[2])
        visible = places <= places[:, None]
        if (window := options.get("sliding_window")) is not None:
            visible &= places > places[:, None] - window
        scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2), None

    return attend


for _kind in QUANTIZATIONS:
    transformers.AttentionInterface.register(f"rounded-{_kind}", attending_to_rounded(_kind))
    transformers.AttentionMaskInterface.register(f"rounded-{_kind}", lambda **_: None)


@torch.inference_mode()
def oracle(model: ZooModel, kind: str, tokens: list[int]) -> Tensor:
    """Return the oracle's logits [tokens, vocab_size]."""
    wide = copy.deepcopy(model.oracle).double()
    wide.config._attn_implementation = f"rounded-{kind}"
    return wide(torch.tensor([tokens])).logits[0].float()


# ---------------------------------------------------------------------- what is stored


@every_kind
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_rounded_numbers_equal_those_of_the_formulas(kind: str, spread: float) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = torch.exp(spread * torch.randn((500, 3, 64), generator=draw))
    numbers = torch.randn((500, 3, 64), generator=draw) * sizes
    numbers[7] = 0
    levels, scales = QUANTIZATIONS[kind].round(numbers)
    assert levels.element_size() == 1 and scales.shape == (500, 3)
    found = QUANTIZATIONS[kind].restore(levels, scales, torch.float32)
    torch.testing.assert_close(found, naively(numbers, kind), rtol=1e-6, atol=0)
    assert (found.abs().amax(-1) == numbers.abs().amax(-1)).float().mean() > 0.6, "but for the last bit"
    assert not found[7].any()


@every_kind
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_makes_its_whole_head_nan(kind: str, what: float) -> None:
    numbers = torch.ones(4, 2, 8)
    numbers[1, 0, 5] = what
    levels, scales = QUANTIZATIONS[kind].round(numbers)
    restored = QUANTIZATIONS[kind].restore(levels, scales, torch.float32)
    assert restored[1, 0].isnan().all() and restored.isnan().sum() == 8
    plain = QUANTIZATIONS[kind].restore(levels, torch.ones_like(scales), torch.float32)
    assert plain.isfinite().all(), "where a mask is 0, nothing may come of it"


@pytest.mark.parametrize("case", ["llama-gqa", "deepseek-v3"])
@every_kind
def test_a_cache_has_the_planned_size(zoo: Zoo, case: str, kind: str) -> None:
    decoder, quantization = read_model_description(zoo[case].folder).decoder, QUANTIZATIONS[kind]
    cache = KvCache(decoder, 5, 16, torch.bfloat16, CPU, quantization)
    planned = 6 * block_bytes(decoder, 16, torch.bfloat16, quantization)
    assert cache._blocks[0].nbytes + cache._scales[0].nbytes == planned
    assert planned == 6 * decoder.num_layers * 16 * decoder.cached_size * (1 + 4 / decoder.head_dim)


@every_kind
def test_blocks_are_copied_and_cleared_with_their_scales(zoo: Zoo, kind: str) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    cache = KvCache(decoder, 4, 2, torch.float32, CPU, QUANTIZATIONS[kind])
    keys, values = torch.randn(2, 4, decoder.num_kv_heads, decoder.head_dim).unbind()
    cache.write(1, torch.arange(4), keys, values)
    cache.copy(torch.tensor([0, 1]), torch.tensor([3, 2]))
    cache.clear(torch.tensor([1]))
    for found, given in zip(cache.gather(1, torch.tensor([3, 2, 1])), (keys, values), strict=True):
        torch.testing.assert_close(found[:4], naively(given, kind), rtol=1e-6, atol=0)
        assert not found[4:].any()
    assert all(not scales.view(5, 2, -1)[1].any() for scales in cache.scales(1) or ())


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "gpt-oss", "gemma2", "deepseek-v3"], ["gpt-oss", "deepseek-v3"])
)
@every_kind
def test_all_rows_attend_to_the_rounded_keys_and_values(zoo: Zoo, case: str, kind: str) -> None:
    """Chunks of any number of rows, after any prefix, with and without windows, attend to the rounded values."""
    decoder = read_model_description(zoo[case].folder).decoder
    windows = (None, AttentionWindow(5), AttentionWindow(40, 8))
    rounded = QUANTIZATIONS[kind]
    check_attention(gathering(decoder), decoder, 16, windows, torch.float32, CPU, rounded)
    check_attention(by_plain_products(decoder), decoder, 16, windows, torch.bfloat16, CPU, rounded)


@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "qwen3", "gpt2", "mistral-window"], ["mistral-window"])
)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kernels": "native"}, marks=needs_native),
        {"kernels": "torch"},
        {"implementation": "transformers"},
    ],
)
@pytest.mark.parametrize("kind", with_all(["int8", "fp8"], ["int8"]))
def test_logits_equal_those_of_a_model_with_rounding(
    zoo: Zoo, case: str, changes: dict[str, str], kind: str
) -> None:
    model = zoo[case]
    engine = load_engine(model.folder, kv_cache_dtype=kind, dtype="float32", **changes)
    errors, lost = [], []
    for seed in range(6):
        prompt = model.prompt(20 + 3 * seed, seed)
        driver = Driver(engine)
        row = driver.start(prompt)
        driver.generate(row, 6, 7)
        driver.release(row)
        positions = slice(len(prompt) - 1, len(row.tokens) - 1)
        expected = oracle(model, kind, row.tokens)[positions]
        found = torch.stack(row.logits)
        errors.append(((found - expected).abs().max() / expected.std()).item())
        lost.append(((expected - model.logits(row.tokens)[positions]).abs().max() / expected.std()).item())
    assert min(lost) > 1e-3, "rounding changes something"
    assert sorted(errors)[1] < 1e-4 and max(errors) < max(lost), (errors, lost)


# ---------------------------------------------------------------------- answers, however they are served


@needs_native
@pytest.mark.parametrize(
    ("kind", "dtype"),
    with_all(
        itertools.product(["int8", "fp8"], ["float32", "bfloat16"]),
        [("int8", "bfloat16"), ("fp8", "float32")],
    ),
)
@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse"]))
def test_logits_of_compiled_layers_are_the_same_to_the_bit(zoo: Zoo, kind: str, dtype: str, way: str) -> None:
    """Mixed requests that arrive one after the other, with chunks, reuse and pauses, compared with each alone."""
    model = zoo["llama-gqa"]
    requests = make_requests(model)[:6]
    engine = load(model.folder, 28, 6, dtype=dtype, kernels="native", kv_cache_dtype=kind)
    together = serve(engine, config_of(way), requests, per_iteration=3)
    assert (together.num_pauses > 0) == way.startswith("utilization")
    for request in requests:
        by_itself = serve(engine, config_of("no-evict", enable_kv_cache_reuse=False), [request])
        assert together.tokens(request) == by_itself.tokens(request)
        for found, expected in zip(logits_of(together, request), logits_of(by_itself, request), strict=True):
            assert torch.equal(found, expected)


WINDOWS = {"max_attention_window_size": (12, 40), "sink_token_length": 3}


def assert_same_in_all_ways(engine: ModelEngine, model: ZooModel) -> None:
    """Compare with each alone: full and partial reuse, chunks, pauses, beams, drafts and prompt lookup."""
    requests = some_of_everything(model)[:6]
    alone = config_of("no-evict", enable_kv_cache_reuse=False)
    expected = [serve(engine, alone, [request]).beams(request) for request in requests]
    for way in ("no-evict", "chunked", "utilization-chunked-no-reuse"):
        served = serve(engine, config_of(way), requests)
        assert [served.beams(request) for request in requests] == expected, way


@needs_native
@pytest.mark.parametrize(
    ("case", "changes", "kind"),
    with_all(
        [
            (case, changes, kind)
            for case, changes in (
                ("llama-gqa", {}),
                ("llama-gqa", WINDOWS),
                ("llama-head-dim", {"tokens_per_block": 6}),
                ("gpt-oss", {}),
                ("gpt-oss", WINDOWS),
            )
            for kind in QUANTIZATIONS
        ],
        [("llama-head-dim", {"tokens_per_block": 6}, "int8"), ("gpt-oss", WINDOWS, "fp8")],
    ),
)
def test_tokens_of_compiled_layers_are_the_same_in_all_ways_of_serving(
    zoo: Zoo, case: str, changes: dict[str, Any], kind: str
) -> None:
    engine = load(zoo[case].folder, 30, 8, kernels="native", kv_cache_dtype=kind, **changes)
    assert_same_in_all_ways(engine, zoo[case])


@pytest.mark.parametrize("kind", with_all(QUANTIZATIONS, ["int8"]))
@pytest.mark.parametrize(
    ("case", "windows"),
    with_all(
        [("llama-gqa", {}), ("llama-gqa", WINDOWS), ("gpt-oss", {}), ("deepseek-v3", {})],
        ["deepseek-v3"],
    ),
)
def test_tokens_of_torchs_operators_are_the_same_in_all_ways_of_serving(
    zoo: Zoo, case: str, windows: dict[str, Any], kind: str
) -> None:
    """Runs in float64, because in float32 products of other shapes may round numbers near the border of two
    levels differently."""
    attention = gathering(read_model_description(zoo[case].folder).decoder)
    quantization = QUANTIZATIONS[kind]
    engine = load_paged(
        zoo[case].folder,
        30,
        8,
        attention=attention,
        quantization=quantization,
        dtype=torch.float64,
        **windows,
    )
    assert_same_in_all_ways(engine, zoo[case])


@pytest.mark.parametrize(
    ("kernels", "kind"),
    with_all(
        [
            pytest.param("native", "int8", marks=needs_native),
            pytest.param("native", "fp8", marks=needs_native),
            ("torch", "int8"),
            ("torch", "fp8"),
        ],
        [("native", "int8"), ("torch", "fp8")],
    ),
)
@pytest.mark.parametrize(("tp_size", "pp_size"), with_all([(2, 1), (1, 2)], [(2, 1)]))
def test_ranks_give_the_results_of_one(zoo: Zoo, kernels: str, kind: str, tp_size: int, pp_size: int) -> None:
    """Ranks sum a shared layer in another order, which may change a level, and with it a token."""
    requests = some_of_everything(zoo["llama-gqa"])[:6]
    config = EngineConfig(str(zoo["llama-gqa"].folder), **ENGINE, kernels=kernels, kv_cache_dtype=kind)
    one = serve(load_model_engine(config), CONFIG, requests)
    several = serve(ThreadRanks(config, tp_size, pp_size), CONFIG, requests)
    num_same = sum(several.beams(request) == one.beams(request) for request in requests)
    assert num_same == 6 if pp_size > 1 else num_same >= 4


@pytest.mark.parametrize("kind", with_all(["int8", "fp8"], ["fp8"]))
def test_recorded_iterations_give_the_same_tokens_as_launched_ones(zoo: Zoo, kind: str) -> None:
    """Includes beam searches, whose blocks are copied between replays."""
    model = zoo["llama-gqa"]
    requests = some_of_everything(model)[:6]
    tape = Tape()
    engines = [
        load_paged(
            model.folder,
            capture=capture,
            attention=FixedRowsAttention(),
            quantization=QUANTIZATIONS[kind],
            dtype=torch.float64,
            max_num_tokens=64,
        )
        for capture in (None, tape)
    ]
    config = config_of("utilization-chunked-no-reuse")
    served = [serve(engine, config, requests) for engine in engines]
    assert len(tape.replayed) > 10
    for request in requests:
        assert served[0].beams(request) == served[1].beams(request)


# ---------------------------------------------------------------------- what is chosen, said and refused


@every_kind
def test_the_log_states_the_saved_memory(zoo: Zoo, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = load_engine(zoo["llama-gqa"].folder, kernels="torch", kv_cache_dtype=kind)
    (line,) = [each for each in caplog.messages if each.startswith("KV cache:")]
    assert f"keys and values in {kind} with a scale for each token and head" in line
    assert "1.33 times the tokens of bfloat16" in line, "of heads of 8, whose scales count"
    assert engine.runner.cache.quantization == QUANTIZATIONS[kind]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_there_is_room_for_about_twice_the_tokens(zoo: Zoo, head_dim: int) -> None:
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, head_dim=head_dim)
    whole, stored = (block_bytes(decoder, 32, torch.bfloat16, each) for each in (None, INT8_LEVELS))
    assert whole / stored == pytest.approx(2 * head_dim / (head_dim + 4))


def test_another_type_is_refused_by_name(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp4', expected auto or int8 or fp8"):
        load_engine(zoo["llama-gqa"].folder, kv_cache_dtype="fp4")


@every_kind
def test_torchs_kernel_for_blocks_refuses_rounded_ones(zoo: Zoo, kind: str) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    with pytest.raises(CannotAttend, match=f"it does not read KV blocks in {kind}"):
        torch_paged_attention(torch.device("cuda"), decoder, QUANTIZATIONS[kind])
