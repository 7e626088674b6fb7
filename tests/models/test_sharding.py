"""Every row of a model belongs to exactly one rank, key heads that are fewer than ranks to several."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import ConfigError
from inflight.models import load_weights, read_model_description
from inflight.models.sharding import WHOLE, Shard
from tests.models.zoo import Zoo

CPU = torch.device("cpu")


def test_slices_cover_everything_once_and_the_last_may_be_short():
    assert [Shard(4, rank).split(211) for rank in range(4)] == [(0, 53), (53, 106), (106, 159), (159, 211)]
    assert [Shard(4, rank).split(5) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert WHOLE.split(7) == (0, 7)


def test_key_heads_are_divided_or_shared(zoo: Zoo):
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder  # 8 heads of 8, 2 key heads
    assert [Shard(2, rank).kv_rows(decoder) for rank in range(2)] == [(0, 8), (8, 16)]
    assert [Shard(4, rank).kv_rows(decoder) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [Shard(4, rank).query_rows(decoder) for rank in range(4)] == [
        (0, 16),
        (16, 32),
        (32, 48),
        (48, 64),
    ]
    part = Shard(4, 1).part_of(decoder)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size, part.hidden_size) == (2, 1, 24, 64)


@pytest.mark.parametrize(("case", "size"), [("llama", 3), ("llama", 16), ("qwen3", 3), ("gpt2", 8)])
def test_what_does_not_divide_is_refused_with_what_would(zoo: Zoo, case: str, size: int):
    model = read_model_description(zoo[case].folder)
    with pytest.raises(ConfigError, match=rf"over {size} ranks does not divide .*; it can be 1, 2, 4"):
        load_weights(model, None, CPU, Shard(size, 0))


@pytest.mark.parametrize("case", ["llama-gqa", "llama-attention-bias", "qwen2", "gpt2"])
def test_the_ranks_hold_the_model_once(zoo: Zoo, case: str):
    """Column-parallel rows and row-parallel columns of all ranks, put together, are the whole matrix."""
    model = read_model_description(zoo[case].folder)
    whole = load_weights(model, None, CPU)
    ranks = [load_weights(model, None, CPU, Shard(2, rank)) for rank in range(2)]
    assert torch.equal(torch.cat([rank.embedding for rank in ranks]), whole.embedding)
    assert torch.equal(torch.cat([rank.lm_head.weight for rank in ranks]), whole.lm_head.weight)
    decoder = model.decoder
    for index, layer in enumerate(whole.layers):
        parts = [rank.layers[index] for rank in ranks]
        assert torch.equal(torch.cat([part.output.weight for part in parts], dim=1), layer.output.weight)
        assert torch.equal(torch.cat([part.down.weight for part in parts], dim=1), layer.down.weight)
        sizes = (decoder.query_size, decoder.kv_size, decoder.kv_size)
        local = [size // 2 for size in sizes]
        split = [part.qkv.weight.split(local) for part in parts]
        for projection, expected in enumerate(layer.qkv.weight.split(sizes)):
            assert torch.equal(torch.cat([part[projection] for part in split]), expected)
        if layer.qkv.bias is not None:
            biases = [part.qkv.bias.split(local) for part in parts]
            for projection, expected in enumerate(layer.qkv.bias.split(sizes)):
                assert torch.equal(torch.cat([part[projection] for part in biases]), expected)
        if layer.down.bias is not None:
            assert all(torch.equal(part.down.bias, layer.down.bias) for part in parts), "added to the sum"
