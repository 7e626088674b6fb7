"""Rows read from PEFT's folders give the same weights as PEFT's own merge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.adapters.lora_modules import Module
from inflight.adapters.lora_rows import check_adapter
from inflight.adapters.peft_folder import read_peft_folder
from inflight.core.request.adapter import LoraWeights
from inflight.engine.low_rank import LowRank, low_rank_layers
from inflight.errors import InvalidArgument
from inflight.gguf import folder as gguf_folder
from inflight.models.registry import ModelDescription, read_model_description
from inflight.models.sharding import Part
from tests.adapters.factories import LLAMA_LAYERS, linear_layers, make_peft_model, save_adapter
from tests.models import gguf_files, quantized
from tests.models.zoo import Zoo
from tests.tiers import with_all

CASES = ["llama-gqa", "qwen2", "qwen3", "mistral-window", "gpt2", "gpt2-inner"]
_FILE = "adapter_model.safetensors"


def split_weights(
    state: dict[str, torch.Tensor], model: ModelDescription
) -> dict[tuple[int, Module], torch.Tensor]:
    """Return the weight [out, in] of every linear layer, with query, key and value separated."""
    decoder, found = model.decoder, {}
    for layer in range(decoder.num_layers):
        prefix = model.names.base + model.names.layers.format(layer)

        def weight(name: str, prefix: str = prefix) -> torch.Tensor:
            stored = state[f"{prefix}{name}.weight"]
            return stored.T if model.names.transposed else stored

        qkv = torch.cat([weight(name) for name in model.names.attention.qkv])
        parts = qkv.split([decoder.query_size, decoder.kv_size, decoder.kv_size])
        up = [weight(name) for name in model.names.mlp.up]
        whole = (*parts, weight(model.names.attention.output), weight(model.names.mlp.down), *up)
        modules = (
            Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V, Module.ATTN_DENSE, Module.MLP_4H_TO_H, Module.MLP_H_TO_4H,
            Module.MLP_GATE,
        )  # fmt: skip
        found.update({(layer, module): each for module, each in zip(modules, whole)})
    return found


def changed(weight: torch.Tensor, low_rank: LowRank | None) -> torch.Tensor:
    if low_rank is None:
        return weight
    product = weight + low_rank.b.float() @ low_rank.a.float()
    return product if low_rank.magnitude is None else low_rank.magnitude.float()[:, None] * product


def assert_merged(
    adapted: Any,
    weights: LoraWeights,
    model: ModelDescription,
    base: dict[str, torch.Tensor],
    bound: float = 1e-6,
) -> None:
    checked = check_adapter(weights, model.decoder, 64).weights
    layers = low_rank_layers(checked, model.decoder, Part.whole(model.decoder))
    expected = split_weights(adapted.merge_and_unload().state_dict(), model)
    for (layer, module), weight in split_weights(base, model).items():
        ours = changed(weight, layers.get(layer, {}).get(module))
        scale = expected[layer, module].abs().max()
        torch.testing.assert_close(
            ours, expected[layer, module], rtol=0, atol=float(bound * scale.clamp(min=1))
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3},
    "rank 8": {"r": 8, "lora_alpha": 16},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "rslora": {"r": 4, "lora_alpha": 8, "use_rslora": True},
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "dora and rslora": {"r": 2, "lora_alpha": 6, "use_dora": True, "use_rslora": True},
    "two layers": {"r": 4, "layers_to_transform": [0, 2]},
    "one layer": {"r": 4, "layers_to_transform": 1},
}


@pytest.mark.parametrize("case", with_all(CASES, ["llama-gqa", "gpt2-inner"]))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_rows_equal_the_weights_that_peft_merges(
    zoo: Zoo, tmp_path: Path, case: str, options: dict[str, Any]
) -> None:
    model = read_model_description(zoo[case].folder)
    adapted = make_peft_model(zoo[case], target_modules=linear_layers(case), **options)
    weights = read_peft_folder(save_adapter(adapted, tmp_path), model)
    assert_merged(adapted, weights, model, zoo[case].oracle.state_dict())


PATTERNS: dict[str, dict[str, Any]] = {
    "by name": {"rank_pattern": {"q_proj": 2, "down_proj": 16}, "alpha_pattern": {"q_proj": 5, "up_proj": 1}},
    "by layer": {
        "rank_pattern": {"layers.1.self_attn.v_proj": 3, "v_proj": 5},
        "alpha_pattern": {"model.layers.0.mlp.gate_proj": 64},
    },
    "by expression": {
        "rank_pattern": {r".*\.(0|2)\.self_attn\..*": 7, r"^model.layers.1.mlp.down_proj": 1},
        "alpha_pattern": {r"layers\.[12]\..*": 2.5},
        "use_rslora": True,
    },
    "dora": {"rank_pattern": {"o_proj": 1}, "alpha_pattern": {"k_proj": 2}, "use_dora": True},
}


@pytest.mark.parametrize("options", PATTERNS.values(), ids=list(PATTERNS))
def test_patterns_of_ranks_and_alphas_are_followed(zoo: Zoo, tmp_path: Path, options: dict[str, Any]) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=LLAMA_LAYERS, r=6, lora_alpha=9, **options)
    weights = read_peft_folder(save_adapter(adapted, tmp_path), model)
    assert_merged(adapted, weights, model, zoo["llama-gqa"].oracle.state_dict())


TARGETS: dict[str, Any] = {
    "one": ["v_proj"],
    "all linear": "all-linear",
    "expression": r".*\.layers\.[02]\.(self_attn\.q_proj|mlp\.down_proj)",
    "whole names": ["model.layers.1.self_attn.q_proj", "mlp.up_proj"],
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_every_form_of_target_modules_is_read(zoo: Zoo, tmp_path: Path, target: Any) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    adapted = make_peft_model(
        zoo["llama-gqa"], target_modules=target, exclude_modules=["layers.0.mlp.up_proj"]
    )
    weights = read_peft_folder(save_adapter(adapted, tmp_path), model)
    assert_merged(adapted, weights, model, zoo["llama-gqa"].oracle.state_dict())


OF_TEXT = r".*language_model\..*\.(q_proj|o_proj|down_proj)"


@pytest.mark.parametrize("options", [{"r": 4, "lora_alpha": 6}, {"r": 4, "use_dora": True}])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_multimodal_models_text_part_is_read(
    zoo: Zoo, tmp_path: Path, options: dict[str, Any], prefix: str
) -> None:
    """Its names are those of transformers 5, or of versions before 4.52."""
    whole = zoo["qwen2.5-vl"]
    model = read_model_description(whole.folder)
    adapted = make_peft_model(whole, target_modules=OF_TEXT, **options)
    folder = save_adapter(adapted, tmp_path)
    tensors = load_file(folder / _FILE).items()
    save_file({name.replace("model.language_model.", prefix): each for name, each in tensors}, folder / _FILE)
    weights = read_peft_folder(folder, model)
    in_modules = replace(model, names=replace(model.names, base="model.language_model."))
    assert_merged(adapted, weights, in_modules, whole.oracle.state_dict())


def test_an_adapter_that_changes_other_parts_of_a_multimodal_model_is_refused(
    zoo: Zoo, tmp_path: Path
) -> None:
    whole = zoo["gemma3-vision"]
    folder = save_adapter(make_peft_model(whole, target_modules=["q_proj"]), tmp_path)
    with pytest.raises(InvalidArgument, match=r"the adapter has a tensor '[\w.]*vision_tower"):
        read_peft_folder(folder, read_model_description(whole.folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_keep_their_stored_type(zoo: Zoo, tmp_path: Path, dtype: torch.dtype) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=LLAMA_LAYERS, r=4, lora_alpha=5, use_dora=True)
    folder = save_adapter(adapted, tmp_path)
    tensors = {name: each.to(dtype) for name, each in load_file(folder / _FILE).items()}
    save_file(tensors, folder / _FILE)
    weights = read_peft_folder(folder, model)
    assert weights.weights.dtype == str(dtype).removeprefix("torch.")
    bound = 0.05 if dtype is torch.bfloat16 else 0.01
    assert_merged(adapted, weights, model, zoo["llama-gqa"].oracle.state_dict(), bound)
    save_file({**tensors, **{k: v.float() for k, v in tensors.items() if "k_proj" in k}}, folder / _FILE)
    assert read_peft_folder(folder, model).weights.dtype == "float32", "holds the numbers of both"


def test_a_pickled_folder_is_read_too(zoo: Zoo, tmp_path: Path) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"])
    one = read_peft_folder(save_adapter(adapted, tmp_path / "one"), model)
    other = save_adapter(adapted, tmp_path / "other", safe_serialization=False)
    assert not (other / _FILE).exists()
    assert read_peft_folder(other, model) == one


def test_dora_works_with_a_checkpoint_without_the_prefix_of_tensor_names(zoo: Zoo, tmp_path: Path) -> None:
    adapted = make_peft_model(zoo["gpt2"], target_modules=["c_attn"], use_dora=True)
    folder = save_adapter(adapted, tmp_path / "adapter")
    zoo["gpt2"].oracle.transformer.save_pretrained(tmp_path / "bare")
    whole = read_model_description(zoo["gpt2"].folder)
    assert read_peft_folder(folder, replace(whole, folder=tmp_path / "bare")) == read_peft_folder(
        folder, whole
    )


@pytest.mark.parametrize("form", ["fp8-block", "ct-int8", "awq", "Q8_0"])
def test_dora_is_relative_to_the_weights_that_a_quantized_checkpoint_stands_for(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    if form in quantized.FORMATS:
        whole = quantized.write(zoo["llama-gqa"], tmp_path / "quantized", quantized.FORMATS[form])
        model = read_model_description(whole.folder)
    else:
        whole = gguf_files.write(tmp_path / "m.gguf", "llama", form)
        model = read_model_description(gguf_folder.checkpoint_of(whole.folder))
    base = {name: each.clone() for name, each in whole.oracle.state_dict().items()}
    adapted = make_peft_model(whole, target_modules=LLAMA_LAYERS, r=4, lora_alpha=6, use_dora=True)
    weights = read_peft_folder(save_adapter(adapted, tmp_path / "adapter"), model)
    assert_merged(adapted, weights, model, base)


def test_fused_projections_equal_their_separate_parts(zoo: Zoo, tmp_path: Path) -> None:
    """`gate_up_proj` and `qkv_proj` give the numbers of their parts, which all have the same A."""
    model = read_model_description(zoo["llama-gqa"].folder)
    decoder, generator = model.decoder, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    prefix = "base_model.model.model.layers.1."
    a, b = draw(3, decoder.hidden_size), draw(2 * decoder.intermediate_size, 3)
    a_qkv, b_qkv = draw(3, decoder.hidden_size), draw(decoder.query_size + 2 * decoder.kv_size, 3)
    parts = {
        "self_attn.q_proj": (a_qkv, b_qkv[: decoder.query_size]),
        "self_attn.k_proj": (a_qkv, b_qkv[decoder.query_size : -decoder.kv_size]),
        "self_attn.v_proj": (a_qkv, b_qkv[-decoder.kv_size :]),
        "mlp.gate_proj": (a, b[: decoder.intermediate_size]),
        "mlp.up_proj": (a, b[decoder.intermediate_size :]),
    }
    found = []
    for layers in ({"mlp.gate_up_proj": (a, b), "self_attn.qkv_proj": (a_qkv, b_qkv)}, parts):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        tensors = {
            f"{prefix}{n}.lora_{x}.weight": m for n, each in layers.items() for x, m in zip("AB", each)
        }
        save_file({name: each.contiguous().clone() for name, each in tensors.items()}, folder / _FILE)
        fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "layers_to_transform": [1]}
        fields["target_modules"] = [each.split(".")[1] for each in layers]
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        checked = check_adapter(read_peft_folder(folder, model), decoder, 8).weights
        found.append(low_rank_layers(checked, decoder, Part.whole(decoder)))
    fused, apart = found
    assert fused[1].keys() == apart[1].keys()
    for module, each in apart[1].items():
        torch.testing.assert_close(fused[1][module].a, each.a, rtol=0, atol=0)
        torch.testing.assert_close(fused[1][module].b, each.b, rtol=0, atol=0)


# ---------------------------------------------------------------------- refusals


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    return save_adapter(
        make_peft_model(zoo["llama-gqa"], target_modules=["q_proj", "up_proj"]), tmp_path / "it"
    )


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def error_of(folder: Path, model: ModelDescription | None) -> str:
    with pytest.raises(InvalidArgument) as raised:
        read_peft_folder(folder, model)
    return str(raised.value)


Q = "model.layers.0.self_attn.q_proj"


def without(part: str) -> Any:
    return lambda tensors: {name: each for name, each in tensors.items() if part not in name}


TENSORS: dict[str, tuple[Any, str]] = {
    "no B": (without("layers.0.self_attn.q_proj.lora_B"), f"no tensor base_model.model.{Q}.lora_B.weight"),
    "a layer is missing": (without("layers.2.mlp"), "model.layers.2.mlp.up_proj: target_modules"),
    "nothing": (without(""), "no tensors"),
    "embedding": (lambda t: {**t, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 4)},
        "target_modules: the adapter has a tensor 'base_model.model.model.embed_tokens.lora_embedding_A'"),
    "head": (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(8, 4)},
        "target_modules: the adapter has a tensor 'base_model.model.lm_head.lora_A.weight'"),
    "whole weights": (lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(8, 4)}, "lm_head.weight"),
    "bias": (lambda t: {**t, f"base_model.model.{Q}.lora_B.bias": torch.ones(64)}, "lora_B.bias"),
    "another layer": (lambda t: {n.replace("layers.2", "layers.3"): e for n, e in t.items()},
        "the model has 3 layers"),
    "not a target": (lambda t: {n.replace("q_proj", "k_proj"): e for n, e in t.items()},
        "although target_modules, exclude_modules and layers_to_transform of adapter_config.json leave it out"),
    "another rank": (lambda t: {n: e[:4] if "lora_A" in n else e[:, :4] for n, e in t.items()},
        "lora_A has shape [4, 64], expected 8 rows, the rank in adapter_config.json (r, rank_pattern)"),
    "ranks differ": (lambda t: {n: e[:4] if "lora_A" in n else e for n, e in t.items()},
        "lora_A has shape [4, 64] and lora_B [64, 8]"),
    "another model": (lambda t: {n: e[:, :32] if "lora_A" in n else e for n, e in t.items()},
        "32 inputs and 64 outputs, expected 64 and 64: the adapter is for another model"),
    "integers": (lambda t: {n: e.to(torch.int8) for n, e in t.items()}, "torch.int8"),
    "magnitudes": (lambda t: {**t, f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(64)},
        "use_dora is False"),
}  # fmt: skip


@pytest.mark.parametrize(("changing", "says"), TENSORS.values(), ids=list(TENSORS))
def test_errors_name_tensors_that_do_not_fit(zoo: Zoo, folder: Path, changing: Any, says: str) -> None:
    tensors = changing(load_file(folder / _FILE))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / _FILE)
    assert says in error_of(folder, read_model_description(zoo["llama-gqa"].folder))


def test_errors_name_damaged_and_missing_files(zoo: Zoo, folder: Path) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    (folder / _FILE).write_bytes(b"no tensors")
    assert "cannot be read" in error_of(folder, model)
    (folder / _FILE).unlink()
    assert f"neither {_FILE} nor adapter_model.bin" in error_of(folder, model)
    (folder / "adapter_model.bin").write_bytes(b"no pickle")
    assert "cannot be read" in error_of(folder, model)
    (folder / "adapter_config.json").write_text("[")
    assert "adapter_config.json cannot be read as JSON" in error_of(folder, model)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in error_of(folder, model)


def test_dora_needs_the_model_and_its_magnitudes(zoo: Zoo, tmp_path: Path) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"], use_dora=True)
    folder = save_adapter(adapted, tmp_path)
    assert "convert_lora --model" in error_of(folder, None)
    tensors = load_file(folder / _FILE)
    save_file(without("magnitude")(tensors), folder / _FILE)
    assert "there is no lora_magnitude_vector, and use_dora is True" in error_of(folder, model)
    save_file({n: e[:8] if "magnitude" in n else e for n, e in tensors.items()}, folder / _FILE)
    assert "lora_magnitude_vector has shape [8], expected [64]" in error_of(folder, model)


def test_without_a_model_any_family_is_read(zoo: Zoo, tmp_path: Path) -> None:
    for case in ("llama-gqa", "gpt2"):
        adapted = make_peft_model(zoo[case], target_modules=linear_layers(case))
        folder = save_adapter(adapted, tmp_path / case)
        assert read_peft_folder(folder) == read_peft_folder(folder, read_model_description(zoo[case].folder))


def test_installed_peft_is_the_version_that_the_rules_follow() -> None:
    assert peft.__version__.startswith("0.21"), (
        "look at LoraConfig's new fields, and at the rules of patterns"
    )
