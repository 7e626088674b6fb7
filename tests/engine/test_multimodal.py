"""Multimodal models: their text parts are served, compared with transformers' whole models."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from inflight.engine.layers.torch_sink import load_weights
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.loader import check_weights
from inflight.models.registry import UnknownFamily
from inflight.multimodal import MULTIMODAL as CLASSES
from tests.engine.driver import alone, load_engine
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.kernels import by_default_and, needs_native
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, load, serve
from tests.engine.tensorrt import engines
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo, ZooModel, without_timm
from tests.models.zoo_multimodal import MULTIMODAL
from tests.tiers import examples, with_all

NUM_TOKENS = examples(32, all=64)
TOLERANCE = 1e-4
ON_TORCH = ["gemma3-vision", "mistral3", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"]
"""Models that run on torch's operators too, and not on compiled layers only."""


@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(ON_TORCH, list(MULTIMODAL)),
        [(case, None) for case in ("gemma3-vision", "qwen2.5-vl", "qwen3-vl", "qwen3.5-vision")],
    ),
)
def test_greedy_tokens_and_logits_are_those_of_the_whole_model(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    prompt = model.prompt(27)
    row = alone(load_engine(model.folder, kernels=kernels), prompt, NUM_TOKENS)
    assert row.generated == model.greedy(prompt, NUM_TOKENS)
    assert len(set(row.generated)) > NUM_TOKENS // 8, "the model repeats itself and would hide mistakes"
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
@pytest.mark.parametrize("case", with_all(MULTIMODAL, ["qwen2.5-vl"]))
def test_packed_chunked_and_reused_requests_give_transformers_tokens(zoo: Zoo, case: str, way: str) -> None:
    model = zoo[case]
    requests = some_of_everything(model, longest=examples(18, all=30))
    engine = load(model.folder, num_blocks=40, max_num_sequences=8)
    assert_as_transformers(model, serve(engine, config_of(way), requests), requests)


@needs_native
@pytest.mark.parametrize(
    ("case", "kernels"),
    [("qwen2.5-vl", "native"), ("qwen3-vl", "native"), ("gemma3-vision", "native"), ("mistral3", "native")],
)
def test_compiled_layers_compute_text_parts_of_supported_families(zoo: Zoo, case: str, kernels: str) -> None:
    assert load_engine(zoo[case].folder).kernels == kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MULTIMODAL)
def test_several_ranks_give_transformers_tokens(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    requests = some_of_everything(model)[:4]
    with ranks(model.folder, (2, 1), num_blocks=80) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    assert_as_transformers(model, served, requests)


@pytest.mark.exhaustive
def test_plans_of_a_text_part_give_transformers_tokens(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["qwen2.5-vl"]
    requests = some_of_everything(model)[:2]
    engine = engines.load(engines.build(model.folder, tmp_path / "plans"))
    assert_as_transformers(model, serve(engine, config_of("no-evict"), requests), requests)


# ---------------------------------------------------------------------- layouts of files


def rewritten(
    model: ZooModel, folder: Path, rename: Callable[[str], str], **changes: Any
) -> dict[str, torch.Tensor]:
    """Copy a model with its tensors renamed and keys of config.json changed, and return its tensors."""
    shutil.copytree(model.folder, folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tensors


def _as_modules(name: str) -> str:
    """Return the name of a tensor's module in transformers 5, under which version 4.52 and others saved it."""
    name = re.sub(r"^language_model\.lm_head", "lm_head", name)
    name = re.sub(r"^language_model\.model", "model.language_model", name)
    name = re.sub(r"^model\.(?!language_model|visual|vision_tower|multi)", "model.language_model.", name)
    return re.sub(r"^(vision_tower|visual|multi_modal_projector|image_newline)", r"model.\1", name)


def _as_old_modules(name: str) -> str:
    """Return the name under which transformers before version 4.52 saved a tensor."""
    name = re.sub(r"^lm_head", "language_model.lm_head", _as_modules(name))
    name = re.sub(r"^model\.language_model", "language_model.model", name)
    return re.sub(r"^model\.", "", name)


def _as_bare_model(name: str) -> str:
    """Return the name in a file of the model without an output projection."""
    return re.sub(r"^model\.", "", _as_modules(name))


@pytest.mark.parametrize(
    "case",
    with_all(["gemma3-vision", "mistral3", "qwen2-vl", "qwen3-vl", "qwen3-vl-moe", "llava"], ["qwen2-vl"]),
)
@pytest.mark.parametrize("rename", [_as_modules, _as_old_modules])
def test_tensors_may_have_the_names_of_any_version(
    zoo: Zoo, tmp_path: Path, case: str, rename: Callable[[str], str]
) -> None:
    model = zoo[case]
    rewritten(model, tmp_path / "renamed", rename)
    prompt = model.prompt(20)
    assert alone(load_engine(tmp_path / "renamed"), prompt, 8).generated == model.greedy(prompt, 8)


def test_a_file_of_the_model_without_output_projection_has_tied_embeddings(zoo: Zoo, tmp_path: Path) -> None:
    model, folder = zoo["gemma3-vision"], tmp_path / "bare"
    tensors = rewritten(model, folder, _as_bare_model, tie_word_embeddings=None)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    description = read_model_description(folder)
    assert description.decoder.tied_embeddings, "transformers' default of this class"
    weights = load_weights(description, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(weights.lm_head.weight, tensors["language_model.embed_tokens.weight"])


@pytest.mark.parametrize("case", MULTIMODAL)
def test_embeddings_are_tied_where_transformers_ties_them(zoo: Zoo, tmp_path: Path, case: str) -> None:
    """Files of tied models have no output projection. Where only we read the key as tied, there is one, and it is
    used."""
    key, model_class = "tie_word_embeddings", type(zoo[case].oracle)
    file = tmp_path / "config.json"
    values = json.loads((zoo[case].folder / "config.json").read_text())
    for whole, text in itertools.product(({}, {key: True}, {key: False}), repeat=2):
        others = [
            {name: each[name] for name in each if name != key} for each in (values, values["text_config"])
        ]
        file.write_text(json.dumps({**others[0], **whole, "text_config": {**others[1], **text}}))
        with torch.device("meta"), without_timm():
            oracle = model_class._from_config(AutoConfig.from_pretrained(tmp_path))
        is_tied = oracle.get_output_embeddings().weight is oracle.get_input_embeddings().weight
        assert read_model_description(tmp_path).decoder.tied_embeddings or not is_tied, file.read_text()


def test_stacks_of_qwen3_vl_may_be_transposed_as_in_published_files(zoo: Zoo, tmp_path: Path) -> None:
    model, folder = zoo["qwen3-vl-moe"], tmp_path / "transposed"
    tensors = rewritten(model, folder, str)
    stacks = {name: each for name, each in tensors.items() if ".mlp.experts." in name}
    assert all(each.dim() == 3 for each in stacks.values()) and stacks
    turned = {name: each.transpose(1, 2).contiguous() for name, each in stacks.items()}
    save_file(tensors | turned, folder / "model.safetensors", {"format": "pt"})
    prompt = model.prompt(20)
    assert alone(load_engine(folder), prompt, 8).generated == model.greedy(prompt, 8)


def test_qwen2_vl_may_have_the_keys_of_its_text_at_the_top(zoo: Zoo, tmp_path: Path) -> None:
    """Files of Qwen2-VL and Qwen2.5-VL from before transformers 4.52 have no text_config."""
    model, folder = zoo["qwen2.5-vl"], tmp_path / "flat"
    rewritten(model, folder, str)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    parameters = text.pop("rope_parameters")
    text["rope_theta"] = parameters.pop("rope_theta")
    text["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    path.write_text(json.dumps(text | values | {"use_sliding_window": False, "sliding_window": 32768}))
    assert read_model_description(folder).decoder == read_model_description(model.folder).decoder
    prompt = model.prompt(20)
    assert alone(load_engine(folder), prompt, 8).generated == model.greedy(prompt, 8)


WITH_MROPE = [case for case in MULTIMODAL if case.startswith("qwen")]


@pytest.mark.parametrize("case", WITH_MROPE)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", "neither"])
def test_qwens_have_mrope_without_the_key_too(zoo: Zoo, tmp_path: Path, case: str, key: str) -> None:
    values = json.loads((zoo[case].folder / "config.json").read_text())
    rope = values["text_config"].pop("rope_parameters")
    del rope["mrope_section"]
    values["text_config"] |= {"rope_theta": rope.pop("rope_theta")} if key == "neither" else {key: rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    whole = read_model_description(zoo[case].folder).decoder
    found = read_model_description(tmp_path).decoder
    assert found.multimodal_rotary_dim == whole.multimodal_rotary_dim > 0


@pytest.mark.parametrize("case", WITH_MROPE)
def test_the_defaults_of_mrope_are_transformers(zoo: Zoo, case: str) -> None:
    config = copy.deepcopy(zoo[case].oracle.config.text_config)
    del config.rope_parameters["mrope_section"]
    rotary = type(zoo[case].oracle.model.language_model.rotary_emb)(config)
    (default,) = {
        each.mrope_section for each in CLASSES if each.model_type == zoo[case].oracle.config.model_type
    }
    assert list(default) == rotary.mrope_section


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gemma3-vision", "qwen3-vl"])
@pytest.mark.parametrize("name", ["fp8-block", "gptq"])
def test_quantized_text_parts_are_unpacked_to_their_numbers(
    zoo: Zoo, tmp_path: Path, case: str, name: str
) -> None:
    """Projections of the other parts are quantized too."""
    model = write(zoo[case], tmp_path, FORMATS[name])
    prompt = model.prompt(20)
    row = alone(load_engine(tmp_path, dtype="float32"), prompt, 16)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------- what is left out, and refusals


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            "gemma3-vision",
            "the engine has the text part of Gemma3ForConditionalGeneration; tensors not read: "
            r"multi_modal_projector \(2\), vision_tower \(\d+\)",
        ),
        (
            "qwen3-vl",
            r"text part of Qwen3VLForConditionalGeneration; tensors not read: model\.visual \(\d+\), mtp \(1\)$",
        ),
    ],
)
def test_one_line_of_the_log_counts_the_tensors_that_are_not_read(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, says: str
) -> None:
    tensors = rewritten(zoo[case], tmp_path / "model", str)
    if case == "qwen3-vl":
        tensors["mtp.norm.weight"] = torch.ones(4)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    caplog.set_level(logging.INFO)
    load_engine(tmp_path / "model")
    (line,) = [each.getMessage() for each in caplog.records if "not read" in each.getMessage()]
    assert re.search(says, line)


def test_unknown_and_missing_tensors_are_named(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tensors = rewritten(zoo["qwen3-vl"], folder, str)
    tensors["model.language_model.layers.0.self_attn.other.weight"] = tensors.pop(
        "model.language_model.layers.0.self_attn.q_proj.weight"
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as error:
        check_weights(read_model_description(folder))
    assert "missing model.language_model.layers.0.self_attn.q_proj.weight" in str(error.value)
    assert "unexpected model.language_model.layers.0.self_attn.other.weight" in str(error.value)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": {"model_type": "cohere"},
            },
            UnknownFamily,
            r"key 'text_config\.model_type' is 'cohere', expected one of llama, ",
        ),
        (
            {
                "architectures": ["Idefics2ForConditionalGeneration"],
                "model_type": "idefics2",
                "text_config": {"model_type": "llama"},
            },
            UnknownFamily,
            r"key 'architectures' is \['Idefics2ForConditionalGeneration'\]",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": []},
            ConfigError,
            r"key 'text_config\.\w+' is missing, expected an integer",
        ),
    ],
)
def test_models_whose_text_part_is_not_known_are_refused(
    tmp_path: Path, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(error, match=message):
        read_model_description(tmp_path)


def test_every_class_has_a_model_in_the_tests() -> None:
    served = {each.model_type for each in CLASSES}
    named = {family.lower().replace("_", "") for family, *_ in MULTIMODAL.values()}
    assert {each.replace("_", "") for each in served} == named


def test_transformers_own_code_does_not_run_a_multimodal_model(zoo: Zoo) -> None:
    with pytest.raises(
        ConfigError, match=r"model_type 'gemma3' .* it takes more than text \(vision_config\)"
    ):
        load_engine(zoo["gemma3-vision"].folder, implementation="transformers")
