"""Each row of a layer belongs to one rank, except that ranks may share a key head; each layer to one stage."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.layers.torch_sink import load_weights
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import DecoderWeights
from inflight.models.sharding import WHOLE, Part, Shard
from inflight.ranks.topology import Mapping
from tests.models.test_published_configs import PUBLISHED
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
def test_sizes_that_do_not_divide_the_model_are_refused_with_valid_ones(zoo: Zoo, case: str, size: int):
    model = read_model_description(zoo[case].folder)
    with pytest.raises(ConfigError, match=rf"over {size} ranks does not divide .*; it can be 1, 2, 4"):
        Part.from_mapping(Mapping(size), model.decoder)


@pytest.mark.parametrize("case", ["llama-gqa", "llama-attention-bias", "qwen2", "gpt2"])
def test_the_ranks_hold_the_model_once(zoo: Zoo, case: str):
    """Column-parallel rows and row-parallel columns of all ranks, concatenated, are the whole matrix."""
    model = read_model_description(zoo[case].folder)
    whole = load_weights(model, None, CPU)
    parts = [Part.from_mapping(Mapping(2, 1, rank), model.decoder) for rank in range(2)]
    ranks = [load_weights(model, None, CPU, part) for part in parts]
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


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v2-lite"])
def test_ranks_divide_the_heads_of_latent_attention_and_replicate_shared_weights(zoo: Zoo, case: str) -> None:
    model = read_model_description(zoo[case].folder)
    decoder = model.decoder
    whole = load_weights(model, None, CPU)
    parts = [Part.from_mapping(Mapping(2, 1, rank), decoder) for rank in range(2)]
    ranks = [load_weights(model, None, CPU, part) for part in parts]
    assert decoder.latent is not None
    num_shared = decoder.latent.cached_dim + (decoder.latent.query_rank or 0)
    for index, layer in enumerate(whole.layers):
        held = [rank.layers[index] for rank in ranks]
        assert torch.equal(torch.cat([each.output.weight for each in held], dim=1), layer.output.weight)
        pairs = [(layer.latent.kv_up, [each.latent.kv_up for each in held])]
        if layer.latent.query_up is not None:
            pairs.append((layer.latent.query_up, [each.latent.query_up for each in held]))
        for expected, of_ranks in pairs:
            assert torch.equal(torch.cat([each.weight for each in of_ranks]), expected.weight)
        own = [each.qkv.weight[:-num_shared] for each in held]
        assert torch.equal(torch.cat([*own, held[0].qkv.weight[-num_shared:]]), layer.qkv.weight)
        assert torch.equal(held[0].qkv.weight[-num_shared:], held[1].qkv.weight[-num_shared:])


def _stages(zoo: Zoo, case: str, pp_size: int) -> tuple[DecoderWeights, list[DecoderWeights]]:
    """Return the whole model, and its parts by stage."""
    model = read_model_description(zoo[case].folder)
    parts = [Part.from_mapping(Mapping(1, pp_size, rank), model.decoder) for rank in range(pp_size)]
    return load_weights(model, None, CPU), [load_weights(model, None, CPU, part) for part in parts]


@pytest.mark.parametrize("case", ["llama-gqa", "llama-gqa-tied", "gpt2"])
@pytest.mark.parametrize("pp_size", [2, 3])
def test_stages_hold_their_layers_and_only_the_ends_embedding_and_head(
    zoo: Zoo, case: str, pp_size: int
) -> None:
    whole, stages = _stages(zoo, case, pp_size)
    counts = [len(stage.layers) for stage in stages]
    assert counts == {2: [2, 1], 3: [1, 1, 1]}[pp_size]
    layers = [layer for stage in stages for layer in stage.layers]
    for layer, expected in zip(layers, whole.layers, strict=True):
        assert torch.equal(layer.qkv.weight, expected.qkv.weight)
        assert torch.equal(layer.down.weight, expected.down.weight)
    first, last = stages[0], stages[-1]
    assert torch.equal(first.embedding, whole.embedding)
    assert (first.position_embedding is None) == (case != "gpt2")
    assert torch.equal(last.final_norm.weight, whole.final_norm.weight)
    assert torch.equal(last.lm_head.weight, whole.lm_head.weight), "also where it is the embedding"
    assert all(stage.embedding is None and stage.position_embedding is None for stage in stages[1:])
    assert all(stage.final_norm is None and stage.lm_head is None for stage in stages[:-1])


def test_a_stage_computes_with_its_layers_windows(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["qwen2-window"].folder).decoder
    parts = [Part.from_mapping(Mapping(1, 2, rank), decoder) for rank in range(2)]
    held = [part.held_config(decoder) for part in parts]
    assert [config.num_layers for config in held] == [2, 1]
    assert (*held[0].sliding_windows, *held[1].sliding_windows) == decoder.sliding_windows
    assert len(set(decoder.sliding_windows)) == 2


@pytest.mark.parametrize(
    ("case", "pp_size", "counts"),
    [("gemma3n", 2, [1, 4]), ("gemma3n-widths", 3, [2, 2, 1]), ("gemma4-shared", 2, [1, 5])],
)
def test_stages_hold_their_layers_per_layer_embeddings_and_the_keys_that_they_read(
    zoo: Zoo, case: str, pp_size: int, counts: list[int]
) -> None:
    whole, stages = _stages(zoo, case, pp_size)
    decoder = read_model_description(zoo[case].folder).decoder
    assert [len(stage.layers) for stage in stages] == counts
    inputs = [stage.token_inputs for stage in stages]
    assert torch.equal(torch.cat([each.embedding for each in inputs], dim=1), whole.token_inputs.embedding)
    rows = torch.cat([each.projection.weight for each in inputs])
    assert torch.equal(rows, whole.token_inputs.projection.weight)
    assert [len(each.projection.weight) for each in inputs] == [count * 20 for count in counts]
    if decoder.altup is not None:
        first, *_, last = [stage.streams for stage in stages]
        assert torch.equal(first.split.weight, whole.streams.split.weight)
        assert torch.equal(last.join.weight, whole.streams.join.weight)
        assert all(stage.streams.split is None for stage in stages[1:])
        assert all(stage.streams.join is None for stage in stages[:-1])
    held = [
        Part.from_mapping(Mapping(1, pp_size, rank), decoder).held_config(decoder) for rank in range(pp_size)
    ]
    assert sum(len(each.cached_layers) for each in held) == len(decoder.cached_layers)
    assert all(0 <= read <= layer for each in held for layer, read in enumerate(each.kv_layers))


@pytest.mark.parametrize(
    ("name", "two", "three"),
    [
        ("Gemma 3n E2B", [15, 15], [9, 9, 12]),
        ("Gemma 4 E2B, its text_config alone", [13, 22], [7, 6, 22]),
        ("a fine-tuned Gemma 4 E4B, without its quantization", [21, 21], [11, 11, 20]),
    ],
)
def test_published_models_are_cut_before_the_first_layer_whose_keys_others_read(
    tmp_path: Path, name: str, two: list[int], three: list[int]
) -> None:
    """transformers' layers read the last own keys and values of their kind, of a window or without."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    decoder = read_model_description(tmp_path).decoder
    for counts in (two, three):
        parts = [
            Part.from_mapping(Mapping(1, len(counts), rank), decoder).layers for rank in range(len(counts))
        ]
        assert [end - begin for begin, end in parts] == counts
    num_own = decoder.num_layers - sum(not decoder.has_own_kv(layer) for layer in range(decoder.num_layers))
    assert decoder.first_read_layer == num_own - 2
    with pytest.raises(
        ConfigError, match=f"pipeline_parallel_size is 30, expected at most {num_own - 1}: la"
    ):
        Part.from_mapping(Mapping(1, 30, 0), decoder)


def test_more_stages_than_layers_are_refused(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but the model has 3 layers only"):
        Part.from_mapping(Mapping(1, 4, 0), decoder)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_stage_refuses_a_checkpoint_that_lacks_any_stages_tensor(
    zoo: Zoo, tmp_path: Path, rank: int
) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(zoo["llama"].folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    model = read_model_description(folder)
    with pytest.raises(ConfigError, match=r"missing lm_head\.weight"):
        load_weights(model, None, CPU, Part.from_mapping(Mapping(1, 2, rank), model.decoder))


MIXTURES = ["mixtral-even", "qwen2-moe", "qwen3-moe-even", "olmoe"]


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize(("tp_size", "moe_ep_size"), [(2, 1), (2, 2), (4, 2)])
def test_the_ranks_hold_the_experts_once(zoo: Zoo, case: str, tp_size: int, moe_ep_size: int) -> None:
    """Groups of ranks hold different experts, whole or in slices; all ranks hold the router."""
    model = read_model_description(zoo[case].folder)
    whole = load_weights(model, None, CPU)
    mappings = [Mapping(tp_size, 1, rank, moe_ep_size) for rank in range(tp_size)]
    parts = [Part.from_mapping(mapping, model.decoder) for mapping in mappings]
    ranks = [load_weights(model, None, CPU, part) for part in parts]
    count, in_group = model.decoder.experts.count // moe_ep_size, tp_size // moe_ep_size
    for index, layer in enumerate(whole.layers):
        if layer.experts is None:
            assert all(rank.layers[index].experts is None for rank in ranks)
            continue
        gates, ups = layer.experts.up.weight.chunk(2, dim=1)
        found = torch.zeros_like(gates), torch.zeros_like(ups), torch.zeros_like(layer.experts.down.weight)
        for number, (part, rank) in enumerate(zip(parts, ranks, strict=True)):
            experts = rank.layers[index].experts
            assert torch.equal(experts.router.weight, layer.experts.router.weight)
            first, last = part.held_config(model.decoder).experts.held
            assert (first, last) == ((number % moe_ep_size) * count, (number % moe_ep_size + 1) * count)
            width = gates.shape[1] // in_group
            own = slice(number // moe_ep_size * width, (number // moe_ep_size + 1) * width)
            assert part.held_config(model.decoder).experts.intermediate_size == width
            for target, tensor in zip(found[:2], experts.up.weight.chunk(2, dim=1), strict=True):
                target[first:last, own] += tensor
            found[2][first:last, :, own] += experts.down.weight
            if layer.up is not None:
                assert len(rank.layers[index].up.weight) == len(layer.up.weight) // tp_size, "as any MLP"
        for tensor, expected in zip(found, (gates, ups, layer.experts.down.weight), strict=True):
            assert torch.equal(tensor, expected)


def test_experts_of_other_ranks_are_not_read(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model_description(zoo["mixtral-even"].folder)
    read: list[str] = []
    read_tensor = Checkpoint.read

    def note(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return read_tensor(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", note)
    load_weights(model, None, CPU, Part.from_mapping(Mapping(2, 1, 1, 2), model.decoder))
    assert {int(name.split("experts.")[1].split(".")[0]) for name in read if "experts." in name} == {3, 4, 5}


@pytest.mark.parametrize(
    ("case", "tp_size", "moe_ep_size", "message"),
    [
        ("llama", 2, 2, "moe_expert_parallel_size is 2, but this model has no experts, expected 1"),
        ("mixtral", 2, 2, "does not divide the 5 experts .* with tensor_parallel_size 2 it can be 1$"),
        ("olmoe", 4, 4, "does not divide the 6 experts .* with tensor_parallel_size 4 it can be 1, 2$"),
    ],
)
def test_groups_that_do_not_divide_the_experts_are_refused(
    zoo: Zoo, case: str, tp_size: int, moe_ep_size: int, message: str
) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    with pytest.raises(ConfigError, match=message):
        Part.from_mapping(Mapping(tp_size, 1, 0, moe_ep_size), decoder)


def test_expert_groups_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"moe_expert_parallel_size is 3, expected a divisor of .*, 4"):
        Mapping(4, 1, 0, 3)


def test_the_ranks_of_a_group_slice_its_experts(zoo: Zoo) -> None:
    """An inner width of 40 gives at most 5 slices of 8: with 8 ranks at least 2 groups are needed."""
    decoder = read_model_description(zoo["qwen3-moe-even"].folder).decoder
    decoder = replace(decoder, experts=replace(decoder.experts, intermediate_size=12))
    with pytest.raises(ConfigError, match="MLP of 12; it can be 1, 2, 4"):
        Shard(8).check(decoder)
    Shard(8, moe_ep_size=2).check(decoder)
    assert Shard(8, 7, 2).part_of(decoder).experts.intermediate_size == 3
