"""Linear biases of attention (ALiBi): their values are transformers', in pieces of chunks too, and kernels without
them refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.find import torch_paged_attention, triton_attention
from inflight.engine.attention.gathering import gathering
from inflight.engine.attention.gathering_metadata import LinearBiases
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from inflight.models.decoder_config import Alibi, DecoderConfig
from inflight.models.families.falcon import alibi_slopes
from inflight.models.sharding import Shard
from tests.engine.driver import alone, load_engine
from tests.models.zoo import Zoo

CPU = torch.device("cpu")
NUM_POSITIONS = 2048


@pytest.mark.parametrize(
    ("theirs", "is_rounded"), [(modeling_bloom, False), (modeling_falcon, True)], ids=["bloom", "falcon"]
)
@pytest.mark.parametrize("num_heads", [1, 4, 12, 16, 71])
def test_biases_are_those_of_transformers(theirs: Any, is_rounded: bool, num_heads: int) -> None:
    mask = torch.ones(1, NUM_POSITIONS, dtype=torch.long)
    expected = theirs.build_alibi_tensor(mask, num_heads, torch.float32)
    biases = LinearBiases(Alibi(alibi_slopes(num_heads), is_rounded=is_rounded), 1)
    positions = torch.arange(NUM_POSITIONS)
    for position in (0, 700, NUM_POSITIONS - 1):
        found = biases.between(torch.tensor([[position]]), positions)
        torch.testing.assert_close(found[0], expected - expected[:, :, [position]], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("case", ["falcon-alibi", "bloom"])
def test_products_and_torchs_kernel_give_the_same_results(zoo: Zoo, case: str) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    windows = (None, AttentionWindow(5), AttentionWindow(40, 8))
    check_attention(gathering(decoder), decoder, 16, windows, torch.float32, CPU)


@pytest.mark.parametrize("case", ["falcon-alibi", "bloom-12-heads"])
def test_chunks_in_pieces_give_transformers_tokens(
    zoo: Zoo, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.attention.gathering_metadata._PIECE_ROWS", 7)
    model = zoo[case]
    prompt = model.prompt(30)
    row = alone(load_engine(model.folder), prompt, 10)
    assert row.generated == model.greedy(prompt, 10)


def test_each_rank_has_the_slopes_of_its_heads(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["bloom"].folder).decoder
    parts = [Shard(2, rank).part_of(decoder).alibi for rank in range(2)]
    assert decoder.alibi is not None
    assert sum((part.slopes for part in parts if part is not None), ()) == decoder.alibi.slopes


@pytest.mark.parametrize(
    "make", [lambda decoder: torch_paged_attention(CPU, decoder), triton_attention], ids=["torch", "triton"]
)
def test_kernels_without_biases_are_not_used(zoo: Zoo, make: Callable[[DecoderConfig], Any]) -> None:
    with pytest.raises(CannotAttend, match="it has no ALiBi"):
        make(read_model_description(zoo["bloom"].folder).decoder)
