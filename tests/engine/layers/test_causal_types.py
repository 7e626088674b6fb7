"""Every type of transformers' language models: it has a map, runs by transformers' code, or is refused by name.

A small random model of each type without a map is made and loaded; types of which no small model can be made are
refused by their config.json. `causal_types.json` lists the types without a map by these kinds, with the reasons;
docs/models.md has the counts. `UPDATE_TABLES=1` with `--all` tries every type and rewrites both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.checkpoint_config import read_config_file
from inflight.engine.layers.transformers_model import find_class
from inflight.errors import ConfigError
from inflight.models import FAMILIES
from inflight.models.unserved import UNSERVED
from inflight.multimodal import MULTIMODAL
from tests.engine.serving import load

LISTED = Path(__file__).with_name("causal_types.json")
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
COUNTS = "<!-- causal types -->\n", "\n<!-- end of causal types -->"
WITH_MAP = {each.model_type for each in (*FAMILIES, *MULTIMODAL)}
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BY_TRANSFORMERS, REFUSED = "by transformers' code", "refused"
AT_LEAST_WITH_MAP, AT_LEAST_SERVED = 64, 108
"""Numbers of types that are implemented here, and of all that are served; they only grow."""

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 32,
    "ffn_dim": 48,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gptj": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1},
}
"""Further keys of types that cannot be made with `SMALL` alone."""
LARGEST = 50_000_000  # parameters of a model that is made to be tried


def try_type(folder: Path, model_type: str) -> tuple[str, str]:
    """Return the kind of a type, and why it is not run."""
    if model_type in UNSERVED and (refusal := refused_by_its_config(folder, model_type)):
        return refusal
    config_class = CONFIG_MAPPING[model_type]
    names = {each.name for each in dataclasses.fields(config_class)}
    try:
        small = {key: value for key, value in SMALL.items() if key in names}
        config = config_class(**small | SPECIAL.get(model_type, {}))
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
        with torch.device("meta"):
            size = sum(each.numel() for each in model_class(config).parameters())
        assert size < LARGEST, f"its small model has {size} parameters"
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
    except Exception as error:  # of any class
        if refusal := refused_by_its_config(folder, model_type):
            return refusal
        raise AssertionError(f"no model of type {model_type} could be made") from error
    try:
        load(folder, 20, implementation="transformers")
    except ConfigError as error:
        return REFUSED, first_line(error)
    return BY_TRANSFORMERS, ""


def refused_by_its_config(folder: Path, model_type: str) -> tuple[str, str] | None:
    """Return why a type with its default config.json is refused whatever its weights are; None if it is not."""
    folder.mkdir(exist_ok=True)
    is_named = model_type in UNSERVED
    config = {} if is_named else json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    try:
        find_class(read_config_file(str(folder)))
    except ConfigError as error:
        return REFUSED, first_line(error)
    return None


def first_line(error: Exception) -> str:
    """Return an error's first line without its checkpoint, and with N for numbers that differ between machines."""
    text = str(error).split("transformers' own code: ")[-1].strip().split("\n")[0]
    return re.sub(r"(?<![-\w])\d+(\.\d+)?(e-?\d+)?", "N", text)[:200]


def listed() -> dict[str, Any]:
    return json.loads(LISTED.read_text())


def counts() -> str:
    """Return the sentence of docs/models.md."""
    found = listed()
    return (
        f"Of the {len(TYPES)} types of language models in transformers {transformers.__version__}, "
        f"{len(WITH_MAP & set(TYPES))} are implemented here,\n"
        f"{len(found[BY_TRANSFORMERS])} run with transformers' code, and {len(found[REFUSED])} are refused with "
        "an error that names the type and the reason."
    )


def test_every_type_is_listed_once() -> None:
    found = listed()
    kinds = [WITH_MAP & set(TYPES), *map(set, found.values())]
    assert set.union(*kinds) == set(TYPES)
    assert sum(map(len, kinds)) == len(TYPES)


def test_no_type_that_was_served_is_lost() -> None:
    num_with_map = len(WITH_MAP & set(TYPES))
    assert num_with_map >= AT_LEAST_WITH_MAP
    assert num_with_map + len(listed()[BY_TRANSFORMERS]) >= AT_LEAST_SERVED


@pytest.mark.exhaustive
def test_types_without_a_map_run_or_are_refused_as_listed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {BY_TRANSFORMERS: {}, REFUSED: {}}
    for each in TYPES:
        if each not in WITH_MAP:
            kind, reason = try_type(tmp_path / each, each)
            found[kind][each] = reason
    if os.environ.get("UPDATE_TABLES"):
        LISTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == listed()


def test_the_page_has_the_counts() -> None:
    head, rest = PAGE.read_text().split(COUNTS[0])
    shown, tail = rest.split(COUNTS[1])
    if os.environ.get("UPDATE_TABLES"):
        PAGE.write_text(head + COUNTS[0] + counts() + COUNTS[1] + tail)
        shown = counts()
    assert shown == counts()
