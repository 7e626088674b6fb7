"""No checkpoint that some code serves is refused by its family before a start, and others are, in a sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from inflight.checkpoint_config import ConfigFile
from inflight.doctor import family
from inflight.gguf.architectures import ARCHITECTURES
from inflight.models.families import FAMILIES, Family
from inflight.multimodal import MULTIMODAL, Multimodal

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "models" / "published_configs.json").read_text(encoding="utf-8")
)
LISTS = "; docs/models.md lists the families"
WITHOUT_DEFAULT = {
    "glm4_moe": {"head_dim": 128},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
"""Keys that published files of these types have, and without which transformers' defaults are no model."""
FOO = {"architectures": ["FooForCausalLM"], "model_type": "foo"}


def refusal(values: dict[str, Any], implementation: str | None = None) -> str | None:
    return family.refused_by_family(ConfigFile(Path("/x/config.json"), values), implementation)


def config_of(each: Family | Multimodal) -> dict[str, Any]:
    """Return a published config.json of a class, else transformers' default."""
    for values in PUBLISHED.values():
        if each.architecture in values.get("architectures", ()):
            return values
    default = json.loads(CONFIG_MAPPING[each.model_type]().to_json_string(use_diff=False))
    return {**default, **WITHOUT_DEFAULT.get(each.model_type, {}), "architectures": [each.architecture]}


@pytest.mark.parametrize("each", FAMILIES, ids=lambda each: each.architecture)
def test_no_family_of_the_registry_is_refused(each: Family):
    values = config_of(each)
    for implementation in (None, "torch"):
        assert refusal(values, implementation) is None


@pytest.mark.parametrize("each", MULTIMODAL, ids=lambda each: each.architecture)
def test_no_multimodal_class_with_a_served_text_part_is_refused(each: Multimodal):
    text = next(values for values in PUBLISHED.values() if values.get("model_type") == "llama")
    values = config_of(each) if each.model_type in CONFIG_MAPPING else {"text_config": text}
    assert refusal({**values, "model_type": each.model_type}) is None


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "facebook/opt-350m"])
def test_no_published_model_is_refused(name: str):
    """Among them are quantized ones, ones with code of their own, and ones that transformers' code runs."""
    assert refusal(PUBLISHED[name]) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: each.class_name)
def test_the_families_of_gguf_files_are_known(architecture: Any):
    assert architecture.class_name in {each.architecture for each in FAMILIES}


def test_a_feature_that_no_code_has_is_refused_as_by_a_load():
    assert "key 'do_layer_norm_before' is False, expected true" in str(
        refusal(PUBLISHED["facebook/opt-350m"])
    )


def test_an_unknown_family_is_refused():
    said = str(refusal(FOO))
    assert said.startswith(
        f"/x is FooForCausalLM, which is none of the {len(FAMILIES)} families of this server, "
    )
    assert " has no decoder of text for foo" in said and said.endswith(LISTS)
    assert "auto_map) is never run" in str(refusal({**FOO, "auto_map": {"AutoModelForCausalLM": "a.B"}}))
    assert "transformers" not in str(refusal(FOO, "torch"))
    assert "families of this server" not in str(refusal(FOO, "transformers"))
    assert refusal(FOO, "tensorrt") is None
    assert "/x is a model without architectures and model_type" in str(refusal({}))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("Qwen33ForCausalLM", "Qwen3ForCausalLM"),
        ("LlavaForConditionalGeneratio", "LlavaForConditionalGeneration"),
    ],
)
def test_similar_names_are_named(name: str, near: str):
    assert f"(most similar: {near}" in str(refusal({"architectures": [name], "model_type": "foo"}))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"architectures": ["Idefics2ForConditionalGeneration"], "model_type": "idefics2"},
            "/x is Idefics2For",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": {"model_type": "foo"},
            },
            "/x is LlavaForConditionalGeneration with a text part of type foo, which is none of the ",
        ),
    ],
)
def test_multimodal_models_that_cannot_be_loaded_are_refused(values: dict[str, Any], says: str):
    said = str(refusal({**values, "vision_config": {"depth": 2}}))
    assert said.startswith(says) and "text alone, not with vision_config" in said


def test_transformers_is_named_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed: pip install" in str(refusal(FOO))
    assert refusal(config_of(FAMILIES[0])) is None


def test_an_unknown_layout_of_transformers_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert refusal(FOO) is None
