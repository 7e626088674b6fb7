"""Attention over gathered blocks, with kernels that compute some of it wrongly, and the resulting choice."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config import EngineConfig
from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.find import find_attention
from inflight.engine.attention.gathering import BY_PRODUCTS, GATHERING, GatheringAttention, gathering
from inflight.engine.attention.interface import Attention
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from tests.engine.driver import Driver
from tests.engine.paging import load_paged
from tests.models.zoo import Zoo
from tests.tiers import with_all

CPU = torch.device("cpu")
WINDOWS = (
    None,
    AttentionWindow(1),
    AttentionWindow(5),
    AttentionWindow(40, 8),
    AttentionWindow(300),
    AttentionWindow(40, is_chunk=True),
)


@dataclass(frozen=True)
class MemoryEfficient:
    """torch's kernel for CUDA with its defect: in a last tile of one row, all heads but the first are wrong.

    Attributes:
        tile_rows: Number of rows in a tile.
    """

    tile_rows: int

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        read = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal)
        is_broadcast = key.stride(1) == 0 and value.stride(1) == 0
        if attn_mask is not None and is_broadcast and query.shape[2] % self.tile_rows == 1:
            read[:, 1:, -1] = torch.nan
        return read


def raising_kernel(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def check(zoo: Zoo, attention: Attention, tokens_per_block: int, dtype: torch.dtype) -> None:
    for case in ("llama", "llama-gqa", "deepseek-v2"):
        decoder = read_model_description(zoo[case].folder).decoder
        decoder = replace(decoder, attention_scale=None)  # the scale of these kernels
        check_attention(attention, decoder, tokens_per_block, WINDOWS, dtype, CPU)


@pytest.mark.parametrize(
    "dtype", with_all([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("tokens_per_block", with_all([3, 32], [3]))
def test_gathered_attention_passes_the_check_at_load(
    zoo: Zoo, dtype: torch.dtype, tokens_per_block: int
) -> None:
    check(zoo, GATHERING, tokens_per_block, dtype)


@pytest.mark.parametrize("tile_rows", with_all([32, 64, 128], [64]))
def test_a_kernel_that_is_wrong_for_a_last_tile_of_one_row_never_gets_one(zoo: Zoo, tile_rows: int) -> None:
    check(zoo, GatheringAttention(MemoryEfficient(tile_rows)), 32, torch.float32)


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "qwen3"])
@pytest.mark.parametrize(
    ("num_before", "num_rows"), [*product((1, 23), (1, 33, 63, 64, 65)), (0, 33), (0, 64), (0, 65)]
)
def test_logits_of_a_chunks_last_row_equal_those_of_the_model(
    zoo: Zoo, case: str, num_before: int, num_rows: int
) -> None:
    """The kernel with the defect gives correct logits of a chunk's last row, which is sampled."""
    model = zoo[case]
    prompt = model.prompt(num_before + num_rows)
    engine = load_paged(model.folder, attention=GatheringAttention(MemoryEfficient(32)))
    driver = Driver(engine)
    row = driver.start(prompt)
    if num_before:
        driver.step({row: num_before})
    driver.step({row: num_rows})
    torch.testing.assert_close(row.logits[-1], model.logits(prompt)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("num_rows", [64, 65])
def test_the_check_finds_a_wrong_tile(zoo: Zoo, tile_rows: int, num_rows: int) -> None:
    """The kernel computes the first row of a second tile wrongly, or the last row of a full tile."""

    def spoilt(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        read = F.scaled_dot_product_attention(query, *args, **kwargs)
        if query.shape[2] % tile_rows == num_rows % tile_rows and query.shape[2] > 8:
            read[..., -1, 0] += 0.2
        return read

    with pytest.raises(CannotAttend, match=r"its results are wrong by 0\.\d+ with a chunk of \d+ rows"):
        check(zoo, GatheringAttention(spoilt), 32, torch.float32)


@pytest.mark.parametrize(
    "dtype", with_all([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("tokens_per_block", with_all([3, 32], [3]))
def test_learned_sinks_equal_those_by_products(zoo: Zoo, dtype: torch.dtype, tokens_per_block: int) -> None:
    decoder = read_model_description(zoo["gpt-oss"].folder).decoder
    for scale in (None, 0.7):
        scaled = replace(decoder, attention_scale=scale)
        check_attention(gathering(scaled), scaled, tokens_per_block, WINDOWS, dtype, CPU)


@pytest.mark.parametrize("most_scores", [1, 1000, 1 << 26])
def test_products_with_learned_sinks_give_the_models_tokens(
    zoo: Zoo, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.attention.gathering._MAX_SCORES", most_scores)
    model = zoo["gpt-oss"]
    driver = Driver(load_paged(model.folder, attention=BY_PRODUCTS))
    row = driver.start(model.prompt(40))
    driver.step({row: 23})
    driver.step({row: 17})
    for _ in range(9):
        driver.step(generation=[row])
    assert row.generated == model.greedy(model.prompt(40), 10)


def test_a_gpu_kernel_without_sums_is_replaced_by_products(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel that returns sums for learned sinks is for CPUs; the meta device simulates a GPU."""
    decoder = read_model_description(zoo["gpt-oss"].folder).decoder
    place = "inflight.engine.attention.find"
    device = torch.device("meta")

    def check(attention: Attention, *arguments: Any) -> None:
        queries = torch.empty(1, 1, 1, decoder.head_dim, device=device)
        try:
            attention._kernel(queries, queries, queries, sinks=torch.empty(1, device=device))
        except NotImplementedError as error:
            raise CannotAttend(str(error)) from error

    with (
        mock.patch(f"{place}.torch_paged_attention", side_effect=CannotAttend("torch 2.6 has none")),
        mock.patch(f"{place}.triton_attention", side_effect=CannotAttend("no triton")),
        mock.patch(f"{place}.check_attention", check),
        caplog.at_level(logging.WARNING),
    ):
        found = find_attention(EngineConfig(""), decoder, WINDOWS, torch.float32, torch.device("cuda"))
    assert found is BY_PRODUCTS
    assert "cannot add learned sinks" in caplog.records[-1].getMessage()


def find(zoo: Zoo, kernel: Any) -> Attention:
    """Find the attention for a GPU that cannot read blocks in place, with this scaled dot product attention."""
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    place = "inflight.engine.attention.find"
    with (
        mock.patch(f"{place}.torch_paged_attention", side_effect=CannotAttend("torch 2.6 has none")),
        mock.patch(f"{place}.triton_attention", side_effect=CannotAttend("no triton")),
        mock.patch(f"{place}.gathering", lambda decoder: GatheringAttention(kernel)),
        mock.patch(f"{place}.check_attention", lambda *arguments: check_attention(*arguments[:5], CPU)),
    ):
        return find_attention(EngineConfig(""), decoder, WINDOWS, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("kernel", [raising_kernel, lambda query, *_, **__: torch.zeros_like(query)])
def test_products_are_used_without_a_correct_kernel(
    zoo: Zoo, kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert find(zoo, kernel) is BY_PRODUCTS
    in_place, gathered = (record.getMessage() for record in caplog.records)
    assert "torch 2.6 has none" in in_place
    assert "plain matrix products" in gathered and "of float32 gives wrong results on this device" in gathered


def test_a_correct_kernel_is_used(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attention = find(zoo, F.scaled_dot_product_attention)
    assert isinstance(attention, GatheringAttention) and attention is not BY_PRODUCTS
    assert len(caplog.records) == 1, "that blocks cannot be read in place"


@pytest.mark.parametrize("windows", [{}, {"max_attention_window_size": (12, 40), "sink_token_length": 4}])
def test_attention_by_matrix_products_gives_the_models_tokens(
    zoo: Zoo, windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the model's even if memory suffices for only a part of the scores at a time."""
    monkeypatch.setattr("inflight.engine.attention.gathering._MAX_SCORES", 1000)
    model = zoo["llama-gqa"]
    answers = []
    for attention in (GATHERING, BY_PRODUCTS):
        driver = Driver(load_paged(model.folder, attention=attention, **windows))
        rows = [driver.start(model.prompt(30 + number, number)) for number in range(4)]
        for _ in range(2):
            driver.step(dict.fromkeys(rows, 15))
        driver.step({row: number for number, row in enumerate(rows) if number}, rows[:1])
        for _ in range(9):
            driver.step(generation=rows)
        answers.append([row.generated for row in rows])
    assert answers[0] == answers[1]
