"""Keys and values in 8 bits: what they are rounded to, and that answers depend on nothing else.

The oracle is transformers' model in float64 whose attention rounds keys and values by the formulas written here,
and then attends plainly. In float32 a number at the border of two levels may come to lie on its other side, so a few
logits are off by as much as a level is; a rule that was another would have all of them off by that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from inflight.engine.torch.attention import by_plain_products, gathering
from inflight.engine.torch.attention_check import check_attention
from inflight.engine.torch.kv_cache import KvCache, block_bytes
from inflight.engine.torch.kv_rounding import FP8_LEVELS, INT8_LEVELS
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from tests.engine.driver import Driver, load_engine
from tests.engine.kernels import needs_native
from tests.models.zoo import Zoo, ZooModel

CPU = torch.device("cpu")
NATIVE = pytest.param("native", marks=needs_native)
every_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])
by_both = pytest.mark.parametrize("kernels", [NATIVE, "torch"])
ROUNDINGS = {"int8": INT8_LEVELS, "fp8": FP8_LEVELS}

# ---------------------------------------------------------------------- the formulas

_STEPS_OF_FP8 = [step * 2.0**-9 for step in range(8)]  # e4m3: those without a leading bit, and all others
_STEPS_OF_FP8 += [(8 + step) * 2.0 ** (power - 10) for power in range(1, 16) for step in range(8)][:-1]
FP8_NUMBERS = torch.tensor(_STEPS_OF_FP8, dtype=torch.float64)


def naively(numbers: Tensor, kind: str) -> Tensor:
    """What is read of `numbers` [..., head_dim] that were stored, in their dtype."""
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
    """An attention function of transformers."""

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


for _kind in ROUNDINGS:
    transformers.AttentionInterface.register(f"rounded-{_kind}", attending_to_rounded(_kind))
    transformers.AttentionMaskInterface.register(f"rounded-{_kind}", lambda **_: None)


@torch.inference_mode()
def oracle(model: ZooModel, kind: str, tokens: list[int]) -> Tensor:
    """[tokens, vocab_size]."""
    wide = copy.deepcopy(model.oracle).double()
    wide.config._attn_implementation = f"rounded-{kind}"
    return wide(torch.tensor([tokens])).logits[0].float()


# ---------------------------------------------------------------------- what is stored


@every_kind
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_levels_are_those_of_the_formulas(kind: str, spread: float) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = torch.exp(spread * torch.randn((500, 3, 64), generator=draw))
    numbers = torch.randn((500, 3, 64), generator=draw) * sizes
    numbers[7] = 0
    levels, scales = ROUNDINGS[kind].round(numbers)
    assert levels.element_size() == 1 and scales.shape == (500, 3)
    found = ROUNDINGS[kind].restore(levels, scales, torch.float32)
    torch.testing.assert_close(found, naively(numbers, kind), rtol=1e-6, atol=0)
    assert (found.abs().amax(-1) == numbers.abs().amax(-1)).float().mean() > 0.6, "but for the last bit"
    assert not found[7].any()


@every_kind
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_makes_its_own_head_none(kind: str, what: float) -> None:
    numbers = torch.ones(4, 2, 8)
    numbers[1, 0, 5] = what
    levels, scales = ROUNDINGS[kind].round(numbers)
    restored = ROUNDINGS[kind].restore(levels, scales, torch.float32)
    assert restored[1, 0].isnan().all() and restored.isnan().sum() == 8
    plain = ROUNDINGS[kind].restore(levels, torch.ones_like(scales), torch.float32)
    assert plain.isfinite().all(), "where a mask is 0, nothing may come of it"


@pytest.mark.parametrize("case", ["llama-gqa", "deepseek-v3"])
@every_kind
def test_a_cache_takes_the_bytes_that_are_planned(zoo: Zoo, case: str, kind: str) -> None:
    decoder, rounding = read_model_description(zoo[case].folder).decoder, ROUNDINGS[kind]
    cache = KvCache(decoder, 5, 16, torch.bfloat16, CPU, rounding)
    planned = 6 * block_bytes(decoder, 16, torch.bfloat16, rounding)
    assert cache._blocks.nbytes + cache._scales.nbytes == planned
    assert planned == 6 * decoder.num_layers * 16 * decoder.cached_size * (1 + 4 / decoder.head_dim)


@every_kind
def test_blocks_are_copied_and_cleared_with_their_scales(zoo: Zoo, kind: str) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    cache = KvCache(decoder, 4, 2, torch.float32, CPU, ROUNDINGS[kind])
    keys, values = torch.randn(2, 4, decoder.num_kv_heads, decoder.head_dim).unbind()
    cache.write(1, torch.arange(4), keys, values)
    cache.copy(torch.tensor([0, 1]), torch.tensor([3, 2]))
    cache.clear(torch.tensor([1]))
    for found, given in zip(cache.gather(1, torch.tensor([3, 2, 1])), (keys, values), strict=True):
        torch.testing.assert_close(found[:4], naively(given, kind), rtol=1e-6, atol=0)
        assert not found[4:].any()
    assert all(not scales.view(5, 2, -1)[1].any() for scales in cache.scales(1) or ())


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("case", ["llama-gqa", "gpt-oss", "gemma2", "deepseek-v3"])
@every_kind
def test_all_rows_attend_to_what_is_stored(zoo: Zoo, case: str, kind: str) -> None:
    """Chunks too, of any number of rows and behind any prefix, in windows and without."""
    decoder = read_model_description(zoo[case].folder).decoder
    windows = (None, AttentionWindow(5), AttentionWindow(40, 8))
    rounded = ROUNDINGS[kind]
    check_attention(gathering(decoder), decoder, 16, windows, torch.float32, CPU, rounded)
    check_attention(by_plain_products(decoder), decoder, 16, windows, torch.bfloat16, CPU, rounded)


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3", "gpt2", "mistral-window"])
@by_both
@every_kind
def test_logits_are_those_of_a_model_that_rounds(zoo: Zoo, case: str, kernels: str, kind: str) -> None:
    model = zoo[case]
    engine = load_engine(model.folder, kernels=kernels, kv_cache_dtype=kind, dtype="float32")
    errors, lost = [], []
    for seed in range(6):
        prompt = model.prompt(20 + 3 * seed, seed)
        driver = Driver(engine)
        row = driver.start(prompt)
        driver.generate(row, 6, 7)
        driver.release(row)
        driver.step(generation=())
        positions = slice(len(prompt) - 1, len(row.tokens) - 1)
        expected = oracle(model, kind, row.tokens)[positions]
        found = torch.stack(row.logits)
        errors.append(((found - expected).abs().max() / expected.std()).item())
        lost.append(((expected - model.logits(row.tokens)[positions]).abs().max() / expected.std()).item())
    assert min(lost) > 1e-3, "rounding changes something"
    assert sorted(errors)[3] < 1e-4 and max(errors) < max(lost), (errors, lost)
