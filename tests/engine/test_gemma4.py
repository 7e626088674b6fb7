"""Gemma 4's own components: forms of its files, the KV cache of layers that differ, per-layer inputs, refusals.

tests/engine/test_every_family.py compares the family with transformers in every way of serving.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.core.request.request import OutputOptions
from inflight.engine.attention.check import check_attention
from inflight.engine.attention.gathering import gathering
from inflight.engine.kv_cache import block_bytes
from inflight.engine.layers.layer_check import check_operations
from inflight.engine.layers.layer_operations import LayerOperations
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.loader import check_weights
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping
from tests.engine.driver import alone, load_engine
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve, to_torch
from tests.engine.tables import TableOracle, make_table, with_table
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE

TOLERANCE = 1e-4


def _changed(model: ZooModel, folder: Path, **changes: Any) -> Path:
    """Copy a model with keys of config.json changed; ... stands for no such key."""
    shutil.copytree(model.folder, folder)
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


def test_both_forms_of_the_sizes_of_full_layers_are_read(zoo: Zoo, tmp_path: Path) -> None:
    """Published files have `global_head_dim`, and transformers 5 writes `per_layer_config`."""
    model = zoo["gemma4"]
    published = _changed(
        model, tmp_path / "model", per_layer_config=..., global_head_dim=24, num_global_key_value_heads=2
    )
    assert read_model_description(published).decoder == read_model_description(model.folder).decoder


def test_projections_that_shared_layers_do_not_use_are_left_unread(zoo: Zoo, tmp_path: Path) -> None:
    """Published files have these projections too."""
    model = zoo["gemma4-shared"]
    folder = _changed(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for module in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{module}.weight"] = torch.full((3, 3), torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    prompt = model.prompt(20)
    assert alone(load_engine(folder), prompt, 8).generated == model.greedy(prompt, 8)
    tensors["model.layers.1.self_attn.k_norm.bias"] = torch.zeros(12)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.1\.self_attn\.k_norm\.bias"):
        check_weights(read_model_description(folder))


def test_a_block_has_room_for_the_heads_of_each_layer_alone(zoo: Zoo) -> None:
    def numbers_per_token(case: str) -> int:
        return block_bytes(read_model_description(zoo[case].folder).decoder, 1, torch.float32) // 4

    assert numbers_per_token("gemma4") == 2 * (4 * 12) + 2 * (2 * 2 * 24), (
        "a layer with a window, two without"
    )
    assert numbers_per_token("gemma4-shared") == 2 * (2 * 4 * 12) + 2 * (4 * 24), (
        "the first three of six layers"
    )


@pytest.mark.parametrize("case", ["gemma3n-widths", "gemma4", "gemma4-shared"])
def test_checks_of_kernels_at_load_take_layers_of_different_sizes(zoo: Zoo, case: str) -> None:
    """A GPU's kernels are checked like this when a model is loaded."""
    decoder, cpu = read_model_description(zoo[case].folder).decoder, torch.device("cpu")
    check_operations(LayerOperations(decoder), LayerOperations(decoder), torch.float32, cpu)
    for layer in decoder.cached_layers:
        check_attention(
            gathering(decoder), decoder.only(layer), 16, (None, AttentionWindow(19)), torch.float32, cpu
        )


@pytest.mark.parametrize("case", ["gemma4", "gemma4-shared"])
def test_rounded_keys_and_values_change_logits_little(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt = model.prompt(30)
    engine = load_engine(model.folder, kv_cache_dtype="int8", dtype="float32")
    row = alone(engine, prompt, 12)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    error = (torch.stack(row.logits) - expected).square().mean().sqrt() / expected.std()
    assert error < 0.05


@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("case", ["gemma3n", "gemma4-shared"])
def test_virtual_tokens_have_the_per_layer_inputs_of_the_padding_token(
    zoo: Zoo, case: str, topology: tuple[int, int]
) -> None:
    """On every stage; the first alone has their embeddings."""
    model = zoo[case]
    rows = make_table(5)
    virtual = [VOCAB_SIZE + index for index in (0, 3, 4, 1, 2, 3)]
    ids = (*model.prompt(9), *virtual, *model.prompt(12, 1))
    output = OutputOptions(return_generation_logits=True)
    request = with_table(1, ids, rows, 10, output=output)
    with ranks(model.folder, topology) as engine:
        served = serve(engine, config_of("chunked"), [request])
    tokens = served.result(request).output_token_ids[0]
    known = torch.tensor([[0 if token >= VOCAB_SIZE else token for token in tokens]])
    with torch.inference_mode():
        embeddings = TableOracle(model).embeddings(tokens, rows)
        is_virtual = torch.tensor(tokens) >= VOCAB_SIZE
        # Ours are scaled like the embeddings of tokens, which transformers' module has scaled already.
        embeddings[0, is_virtual] *= 64**0.5
        found = model.oracle(
            inputs_embeds=embeddings, per_layer_inputs=model.oracle.model.get_per_layer_inputs(known)
        ).logits[0]
    torch.testing.assert_close(
        to_torch(served.result(request).generation_logits[0]),
        found[len(ids) - 1 : -1],
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        (
            "gemma4",
            {"enable_moe_block": True},
            "'enable_moe_block' is True, expected false, or the keys num_exp",
        ),
        ("gemma4-shared", {"num_kv_shared_layers": 6}, "'num_kv_shared_layers' is 6, expected .* at most 5"),
        ("gemma4-shared", {"num_kv_shared_layers": 5}, "of type full_attention has its own keys and values"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 99}, "'vocab_size_per_layer_input' is 99, expected"),
        (
            "gemma4",
            {"per_layer_config": {"0": {"head_dim": 8}}},
            "'per_layer_config' is .*, expected head_dim",
        ),
        ("gemma4-unified-text", {"enable_moe_block": True}, "this family has no experts"),
        (
            "gemma4-unified-text",
            {"hidden_size_per_layer_input": 8},
            "this family has no per-layer embeddings",
        ),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 8}}}, "'per_layer_config' is .* the same for all"),
        (
            "gemma4",
            {"per_layer_config": {str(layer): {"num_key_value_heads": 3} for layer in (1, 2)}},
            "'per_layer_config' is .*, expected divisors of num_attention_heads, 8",
        ),
    ],
)
def test_unsupported_files_are_refused_by_the_key(
    zoo: Zoo, tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_description(_changed(zoo[case], tmp_path / "model", **changes))


def test_ranks_that_do_not_divide_the_heads_of_every_layer_are_refused(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="does not divide this model: 8 heads, 4 or 2 key heads, MLP of 96"):
        Part.from_mapping(Mapping(3, 1, 0), read_model_description(zoo["gemma4"].folder).decoder)
