"""Safetensors files → weights: files, names, shapes and dtypes, and the errors for invalid ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import progress
from inflight.engine.layers.torch_sink import load_weights
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.decoder_weights import DecoderWeights
from inflight.models.loader import num_weight_bytes
from inflight.models.sharding import Part, Shard
from inflight.ranks.topology import Mapping
from tests.models.zoo import Zoo, make_model
from tests.models.zoo_configs import CASES

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _load(folder: Path, dtype: torch.dtype | None = None) -> DecoderWeights:
    return load_weights(read_model_description(folder), dtype, CPU)


def _tensors(weights: Any) -> list[torch.Tensor]:
    """Return every tensor in the tree, in order."""
    if isinstance(weights, torch.Tensor):
        return [weights]
    if isinstance(weights, tuple):
        return [tensor for item in weights for tensor in _tensors(item)]
    if is_dataclass(weights):
        return [t for field in fields(weights) for t in _tensors(getattr(weights, field.name))]
    return []


def _assert_equal(one: DecoderWeights, other: DecoderWeights) -> None:
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def edited(zoo: Zoo, tmp_path: Path) -> Callable[..., Path]:
    """A function that copies a case's checkpoint and changes its tensors."""

    def edit(case: str, change: Callable[[Tensors], Tensors]) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(zoo[case].folder, folder)
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        return folder

    return edit


@pytest.mark.parametrize(
    "case", ["llama", "llama-gqa-tied", "gpt2", "mixtral-even", "deepseek-v3", "gemma3n"]
)
@pytest.mark.parametrize("mapping", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_size_of_each_ranks_weights_is_known_before_they_are_read(
    zoo: Zoo, case: str, mapping: tuple[int, int]
) -> None:
    tp_size, pp_size = mapping
    model = read_model_description(zoo[case].folder)
    for rank in range(tp_size * pp_size):
        part = Part.from_mapping(Mapping(tp_size, pp_size, rank), model.decoder)
        loaded = load_weights(model, torch.float32, CPU, part)
        num_bytes = sum(tensor.nbytes for tensor in {id(each): each for each in _tensors(loaded)}.values())
        assert num_weight_bytes(model, torch.float32, torch.float32, part=part) == num_bytes


@pytest.mark.parametrize("case", ["llama-gqa-tied", "qwen3", "gpt2"])
def test_a_sharded_checkpoint_loads_the_weights_of_the_whole_one(zoo: Zoo, tmp_path: Path, case: str) -> None:
    sharded = make_model(tmp_path / "sharded", case, max_shard_size="60KB").folder
    assert len(list(sharded.glob("*.safetensors"))) > 2
    _assert_equal(_load(sharded), _load(zoo[case].folder))


def test_separate_projections_are_concatenated_in_order(zoo: Zoo) -> None:
    oracle = zoo["qwen2"].oracle.model.layers[1]
    layer = _load(zoo["qwen2"].folder).layers[1]
    attention, mlp = oracle.self_attn, oracle.mlp
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(layer.qkv.weight, torch.cat(weights))
    assert torch.equal(
        layer.qkv.bias, torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    )
    assert torch.equal(layer.up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))


def test_tied_embeddings_are_one_tensor(zoo: Zoo) -> None:
    weights = _load(zoo["llama-gqa-tied"].folder)
    assert weights.lm_head.weight is weights.embedding


def test_gpt2_without_a_head_and_with_mask_buffers_loads(zoo: Zoo, edited: Callable[..., Path]) -> None:
    """The first GPT-2 checkpoints have this format."""

    def strip(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        for layer in range(3):
            bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256)
            bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        return bare

    _assert_equal(_load(edited("gpt2", strip)), _load(zoo["gpt2"].folder))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("deepseek-v3", "num_nextn_predict_layers"),
        ("glm4-moe", "num_nextn_predict_layers"),
        ("minimax-m2", "num_mtp_modules"),
    ],
)
def test_draft_layers_are_not_read(zoo: Zoo, edited: Callable[..., Path], case: str, key: str) -> None:
    """As many layers after the model's three as the key says are left out; another one is unexpected."""

    def add(tensors: Tensors) -> Tensors:
        names = ("eh_proj.weight", "self_attn.o_proj.weight", "shared_head.head.weight")
        layers = (3, 4)
        return tensors | {
            f"model.layers.{layer}.{name}": torch.ones(2, 3) for layer in layers for name in names
        }

    folder = edited(case, add)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 2}))
    _assert_equal(_load(folder), _load(zoo[case].folder))
    (folder / "config.json").write_text(json.dumps({**config, key: 1}))
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.4\.eh_proj\.weight"):
        _load(folder)


def test_one_draft_layer_of_deepseek_v3_is_left_out_without_the_key(edited: Callable[..., Path]) -> None:
    def add(*layers: int) -> Callable[[Tensors], Tensors]:
        return lambda tensors: (
            tensors | {f"model.layers.{each}.eh_proj.weight": torch.ones(2) for each in layers}
        )

    folder = edited("deepseek-v3", add(3, 4))
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.4\.eh_proj\.weight$"):
        _load(folder)


def test_further_layers_are_unexpected_where_a_family_has_no_draft_layers(
    edited: Callable[..., Path],
) -> None:
    folder = edited(
        "deepseek-v2", lambda tensors: tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 3)}
    )
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.3\.eh_proj\.weight"):
        _load(folder)


def test_the_routers_correction_bias_keeps_its_precision(zoo: Zoo) -> None:
    model = zoo["deepseek-v3"]
    layers = _load(model.folder, torch.bfloat16).layers
    stored = model.oracle.model.layers[1].mlp.gate.e_score_correction_bias
    assert layers[0].experts is None and layers[1].experts is not None
    assert layers[1].experts.router.weight.dtype == torch.bfloat16
    assert layers[1].experts.choice_bias is not None and torch.equal(layers[1].experts.choice_bias, stored)


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "lfm2-moe"])
@pytest.mark.parametrize("part", [None, Shard(2, 1), Shard(4, 3, 2)], ids=str)
def test_single_and_stacked_experts_load_alike(
    zoo: Zoo, tmp_path: Path, case: str, part: Shard | None
) -> None:
    """Both formats of transformers, before and since version 5, load equally."""
    model = zoo[f"{case}-even" if part is not None and f"{case}-even" in CASES else case]
    model.oracle.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any("experts.gate_up_proj" in name for name in names)
    assert not any("experts.0." in name for name in names)

    def load(folder: Path) -> DecoderWeights:
        description = read_model_description(folder)
        whole = Part.whole(description.decoder)
        return load_weights(description, None, CPU, replace(whole, shard=part) if part else whole)

    _assert_equal(load(tmp_path), load(model.folder))


def test_weights_have_the_given_the_stated_or_their_own_dtype(zoo: Zoo, edited: Callable[..., Path]) -> None:
    folder = edited("llama", lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    assert {t.dtype for t in _tensors(_load(folder))} == {torch.float32}, "config.json says float32"
    assert {t.dtype for t in _tensors(_load(folder, torch.float16))} == {torch.float16}
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert {t.dtype for t in _tensors(_load(folder))} == {torch.bfloat16}, "the tensors' own"


def test_weights_outlive_the_file(zoo: Zoo, edited: Callable[..., Path]) -> None:
    folder = edited("llama", lambda tensors: tensors)
    weights = _load(folder)
    file = folder / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    _assert_equal(weights, _load(zoo["llama"].folder))


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("layers.1.mlp.up_proj.weight"),
            "missing model.layers.1.mlp.up_proj.weight; unexpected none",
        ),
        (_without("input_layernorm.weight"), "missing model.layers.0.input_layernorm.weight, "),
        (_without("lm_head.weight"), "missing lm_head.weight"),
        (
            _with("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
            "unexpected model.layers.0.self_attn.q_pro",
        ),
        (
            _with("model.layers.3.mlp.up_proj.weight", torch.ones(2)),
            "unexpected model.layers.3.mlp.up_proj.weight",
        ),
        (
            _with("model.norm.weight", torch.ones(63)),
            "model.safetensors: tensor 'model.norm.weight' has shape [63], expected [64]",
        ),
        (
            _with("lm_head.weight", torch.ones(64, 211)),
            "tensor 'lm_head.weight' has shape [64, 211], expected [211, 64]",
        ),
        (
            _with("model.norm.weight", torch.ones(64, dtype=torch.int8)),
            "tensor 'model.norm.weight' has dtype I8, expected one of float32, bfloat16, float16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    edited: Callable[..., Path], change: Callable[[Tensors], Tensors], message: str
) -> None:
    folder = edited("llama", change)
    with pytest.raises(ConfigError) as error:
        _load(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


def test_missing_or_damaged_files_are_refused(edited: Callable[..., Path]) -> None:
    folder = edited("llama", lambda tensors: tensors)
    file = folder / "model-1.safetensors"
    (folder / "model.safetensors").rename(file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match="has no tensor 'a'"):
        _load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors does not exist"):
        _load(folder)
    for file_name in (3, None, "../model-1.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": file_name}}))
        with pytest.raises(ConfigError, match="expected the name of a file in the same folder"):
            _load(folder)
    index.unlink()
    file = file.rename(folder / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        _load(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"found pytorch_model\.bin\. Weights are read from safetensors"):
        _load(folder)


def test_progress_is_silent_without_a_terminal(
    zoo: Zoo,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 1e-9)
    caplog.set_level("INFO", "inflight")
    _load(zoo["llama"].folder)
    assert capfd.readouterr() == ("", "")
    said = [record.message for record in caplog.records]
    assert said[0] == "Loading llama: 0.00 of 0.00 GB"
    assert said[-1].startswith("Loading llama: 0.00 GB in ")
