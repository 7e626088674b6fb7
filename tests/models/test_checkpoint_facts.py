"""Facts of a config.json for programs that do not load the checkpoint, compared with a load's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from inflight.checkpoint_config import CheckpointFacts, ConfigFile
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, read_model_description
from inflight.multimodal import DEFAULTS, MULTIMODAL, Multimodal, find_text_part
from inflight.positions import position_keys, stated_positions
from tests.models.test_published_configs import MLP_WIDTHS, PUBLISHED, READ
from tests.models.test_registry import GPT2, LLAMA
from tests.models.zoo import make_config
from tests.models.zoo_configs import CASES, MAX_POSITIONS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MINISTRAL3 = {
    **LLAMA,
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1},
}
GEMMA3N = {
    **LLAMA,
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "intermediate_size": [40 + 8 * (layer % 3) for layer in range(LLAMA["num_hidden_layers"])],
    "num_kv_shared_layers": 0,
}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _facts(folder: Path, config: object, generation: object = None) -> CheckpointFacts:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return CheckpointFacts.read(folder)


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        (LLAMA, None),
        (LLAMA, {"eos_token_id": [5, 7]}),
        (LLAMA, {"eos_token_id": []}),
        (LLAMA, {}),
        ({**LLAMA, "torch_dtype": "bfloat16"}, None),
        ({**LLAMA, "torch_dtype": "bfloat16", "dtype": "float16"}, None),
        ({**LLAMA, "dtype": "auto"}, None),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.5}}, None),
        ({**LLAMA, "rope_scaling": YARN}, None),
        ({**LLAMA, "rope_parameters": {**YARN, "rope_theta": 1e6}}, None),
        ({**LLAMA, "rope_scaling": LLAMA3}, None),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, None),
        ({**MIXTRAL, "num_local_experts": 4, "num_experts_per_tok": 2}, None),
        (MINISTRAL3, None),
        ({**MINISTRAL3, "original_max_position_embeddings": 32}, None),
        (GPT2, None),
        ({**GPT2, "n_inner": 80}, None),
        (GEMMA3N, None),
    ],
)
def test_facts_equal_those_of_a_load(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    facts = _facts(tmp_path, config, generation)
    decoder = read_model_description(tmp_path).decoder
    assert facts.num_kv_heads == decoder.num_kv_heads
    assert facts.longest_sequence == decoder.max_positions
    assert facts.eos_token_ids == decoder.eos_token_ids
    _check_sizes(facts, decoder)
    assert facts.name == config["architectures"][0]
    assert facts.quantization is None


@pytest.mark.parametrize("name", READ)
def test_facts_of_published_checkpoints_equal_those_of_a_load(tmp_path: Path, name: str) -> None:
    facts = _facts(tmp_path, PUBLISHED[name])
    decoder = read_model_description(tmp_path).decoder
    assert decoder.latent is not None or facts.num_kv_heads == decoder.num_kv_heads
    assert facts.longest_sequence == decoder.max_positions
    assert facts.eos_token_ids == decoder.eos_token_ids
    if name in MLP_WIDTHS:  # of the layers with the width that config.json states
        values = PUBLISHED[name].get("text_config", PUBLISHED[name])
        key = "intermediate_size" if "intermediate_size" in values else "block_ff_dim"
        decoder = replace(decoder, intermediate_size=values[key])
    _check_sizes(facts, decoder)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] != "Bloom"])
def test_the_longest_sequence_is_that_of_a_load(tmp_path: Path, case: str, stated: bool) -> None:
    """Also without the keys: then the number is that of transformers."""
    values, defaults = make_config(case).to_dict(), type(make_config(case))().to_dict()
    keys = [key for key in position_keys(values) if key in values]
    assert keys, "transformers' configuration has the key"
    if not stated:
        values = {key: value for key, value in values.items() if key not in keys}
    facts = _facts(tmp_path, values)
    assert facts.longest_sequence == read_model_description(tmp_path).decoder.max_positions
    assert stated_positions(values) == (MAX_POSITIONS if stated else defaults[keys[0]])


def test_without_scaling_the_length_is_that_of_the_familys_own(tmp_path: Path) -> None:
    facts = _facts(tmp_path, {"model_type": "gpt_oss", "max_position_embeddings": 65536})
    assert facts.longest_sequence == 131072
    assert _facts(tmp_path, {"model_type": "ministral3"}).longest_sequence == 262144
    assert _facts(tmp_path, {"model_type": "kimi_linear", "model_max_length": 99}).longest_sequence == 99


def test_name_and_tokenizer_are_those_of_the_whole_model(tmp_path: Path) -> None:
    facts = _facts(tmp_path, {**PUBLISHED["Gemma 3 4B with pictures"], "tokenizer_class": "GemmaTokenizer"})
    assert (facts.name, facts.model_type) == ("Gemma3ForConditionalGeneration", "gemma3")
    assert facts.tokenizer_class == "GemmaTokenizer"


WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"num_hidden_layers": 2, "eos_token_id": 7, "dtype": "float16"},
}
INT8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        ({}, {}, ((7,), "float16", None)),
        ({"eos_token_id": [1, 106], "torch_dtype": "bfloat16"}, {}, ((1, 106), "bfloat16", None)),
        ({"eos_token_id": None, "dtype": None}, {}, ((7,), "float16", None)),
        ({"quantization_config": INT8}, {}, ((7,), "float16", INT8)),
        ({}, {"quantization_config": INT8}, ((7,), "float16", INT8)),
        ({"sliding_window": 3, "num_hidden_layers": 9}, {}, ((7,), "float16", None)),
    ],
)
def test_some_keys_beside_text_config_count_for_the_text_part(
    tmp_path: Path, outside: dict[str, Any], inside: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    facts = _facts(tmp_path, {**WHOLE, **outside, "text_config": {**WHOLE["text_config"], **inside}})
    quantization = facts.quantization and facts.quantization.values
    assert (facts.eos_token_ids, facts.dtype, quantization) == expected
    assert facts.num_layers == 2


def test_an_error_says_where_the_key_of_a_text_part_is(tmp_path: Path) -> None:
    values = {**WHOLE, "torch_dtype": "int3", "text_config": {"num_hidden_layers": 2, "eos_token_id": "x"}}
    facts = _facts(tmp_path, values)
    with pytest.raises(ConfigError, match=r"key 'text_config\.eos_token_id' is 'x'"):
        facts.eos_token_ids  # noqa: B018
    with pytest.raises(ConfigError, match=r"key 'torch_dtype' is 'int3'"):
        facts.dtype  # noqa: B018


@pytest.mark.parametrize("kind", DEFAULTS)
def test_sizes_that_a_text_part_omits_have_the_defaults_of_transformers(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    for key, value in DEFAULTS[kind].items():
        if key == "rope_theta":
            assert config.rope_parameters["rope_theta"] == value
        elif key != "norm_topk_prob":  # no key of transformers' class
            found = getattr(config, key)  # of Gemma 3n, a list of the MLPs' widths
            assert (max(found) if isinstance(found, list) else found) == value, key


@pytest.mark.parametrize("each", MULTIMODAL, ids=lambda each: each.architecture)
def test_keys_that_a_text_part_omits_have_the_defaults_of_its_class(each: Multimodal) -> None:
    """Most classes of multimodal models have those of the text part's own class."""
    whole = CONFIG_MAPPING[each.model_type](text_config={"model_type": each.text_type})
    own = CONFIG_MAPPING[each.text_type](**each.defaults)
    assert whole.text_config.to_dict() == own.to_dict()
    part = find_text_part({"model_type": each.model_type, "text_config": {"num_hidden_layers": 2}})
    assert part is not None
    assert part.values.items() >= {**each.defaults, "num_hidden_layers": 2}.items()


def _check_sizes(facts: CheckpointFacts, decoder: DecoderConfig) -> None:
    assert facts.vocab_size == decoder.vocab_size
    assert facts.num_layers == decoder.num_layers
    assert facts.hidden_size == decoder.hidden_size
    assert facts.num_heads == decoder.num_heads
    assert facts.mlp_size == decoder.intermediate_size
    assert facts.num_experts == (decoder.experts.count if decoder.experts else None)
    assert facts.dtype == decoder.dtype


def test_invalid_sizes_count_as_not_stated(tmp_path: Path) -> None:
    facts = _facts(tmp_path, {"vocab_size": "many", "num_experts": 0, "hidden_size": True, "n_embd": None})
    assert (facts.vocab_size, facts.num_experts, facts.hidden_size, facts.mlp_size) == (None,) * 4
    assert (facts.longest_sequence, facts.num_kv_heads, facts.dtype, facts.eos_token_ids) == (
        None,
        None,
        None,
        (),
    )
    assert facts.name == "unnamed"


def test_facts_are_read_from_the_first_folder_with_a_config_json(tmp_path: Path) -> None:
    for name, size in (("first", None), ("second", 32), ("third", 48)):
        (tmp_path / name).mkdir()
        if size is not None:
            (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    folders = [tmp_path / name for name in ("missing", "first", "second", "third")]
    assert CheckpointFacts.read(*folders).vocab_size == 32
    assert CheckpointFacts.read(*folders[:2]).vocab_size is None


def test_end_ids_need_no_config_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert CheckpointFacts.read(tmp_path).eos_token_ids == (9,)


def test_an_error_names_the_whole_path_of_a_key(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "config.json", {"rope_parameters": {"full_attention": {"factor": -1}}})
    with pytest.raises(ConfigError, match=r"'rope_parameters\.full_attention\.factor' is -1"):
        config.child("rope_parameters").child("full_attention").number("factor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json cannot be read as JSON: Expecting property name.*: download it again"),
        ("[]", r"config\.json holds a list, expected a JSON object"),
    ],
)
def test_the_error_names_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        CheckpointFacts.read(tmp_path)


@pytest.mark.parametrize(
    ("fact", "config", "message"),
    [
        (
            "eos_token_ids",
            {"eos_token_id": "</s>"},
            "key 'eos_token_id' is '</s>', expected a token id or a list",
        ),
        (
            "dtype",
            {"dtype": "int3"},
            "key 'dtype' is 'int3', expected one of float32, bfloat16, float16, or auto",
        ),
        (
            "quantization",
            {"quantization_config": 4},
            "key 'quantization_config' is 4, expected a JSON object",
        ),
        ("model_type", {"model_type": 4}, "key 'model_type' is 4, expected a string"),
    ],
)
def test_the_error_names_a_key_of_the_wrong_type(
    tmp_path: Path, fact: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(_facts(tmp_path, config), fact)
