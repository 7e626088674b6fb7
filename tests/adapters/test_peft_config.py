"""Every field of PEFT's LoraConfig, and PEFT's own rules for patterns and targets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from inflight.adapters.peft_config import HARMLESS, HONOURED, PeftConfig
from inflight.errors import InvalidArgument
from inflight_client import lora as client

REFUSED: dict[str, Any] = {
    "modules_to_save": ["lm_head"],
    "megatron_config": {"tensor_model_parallel_size": 2},
    "trainable_token_indices": [1, 2],
    "velora_config": {"num_groups": 64},
    "alora_invocation_tokens": [5],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"x": 1},
}
"""Fields that a row cannot express, each with a refused value."""
WRONG: dict[str, Any] = {
    "peft_type": "LOHA",
    "bias": "lora_only",
    "r": 0,
    "lora_alpha": "8",
    "use_rslora": "yes",
    "use_dora": 1,
    "rank_pattern": {"q_proj": 0},
    "alpha_pattern": {"q_proj": None},
    "target_modules": [1],
    "exclude_modules": "(",
    "layers_to_transform": ["1"],
    "layers_pattern": [1],
    "init_lora_weights": "pissa_niter_4",
}
"""Fields that are honoured, each with a refused value."""


def fields_of_peft() -> dict[str, Any]:
    return json.loads(json.dumps(peft.LoraConfig(target_modules=["q_proj"]).to_dict(), default=list))


def test_every_lora_config_field_is_honoured_harmless_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert names == HONOURED | HARMLESS | set(REFUSED)
    assert not HONOURED & HARMLESS and not (HONOURED | HARMLESS) & set(REFUSED)
    assert set(WRONG) == HONOURED


def test_the_client_honours_the_same_fields_as_the_server() -> None:
    assert (client.HONOURED, client.HARMLESS) == (HONOURED, HARMLESS)


def test_a_config_that_peft_saves_by_default_is_accepted() -> None:
    config = PeftConfig.from_values(fields_of_peft())
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 8, ("q_proj",))


@pytest.mark.parametrize(("field", "value"), [*REFUSED.items(), *WRONG.items(), ("use_new_trick", True)])
def test_fields_that_a_row_cannot_express_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        PeftConfig.from_values({**fields_of_peft(), field: value})
    assert str(raised.value).startswith(f"adapter_config.json: {field} is {value!r}, expected ")


@pytest.mark.parametrize(
    ("field", "value"),
    [*REFUSED.items(), *[(each, WRONG[each]) for each in ("peft_type", "bias", "init_lora_weights")]],
)
def test_the_client_refuses_the_same_values(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields_of_peft(), field: value}))
    with pytest.raises(ValueError, match=f"adapter_config.json: {field} is "):
        client.load_lora(tmp_path)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_needs_another_model_is_refused(init: str) -> None:
    with pytest.raises(InvalidArgument, match="path_initial_model_for_weight_conversion"):
        PeftConfig.from_values({**fields_of_peft(), "init_lora_weights": init})


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialization_that_keeps_the_model_is_accepted(init: Any) -> None:
    PeftConfig.from_values({**fields_of_peft(), "init_lora_weights": init})


@pytest.mark.parametrize("nothing", [None, False, "", [], {}])
def test_an_unknown_field_with_an_empty_value_is_accepted(nothing: Any) -> None:
    PeftConfig.from_values({**fields_of_peft(), "use_new_trick": nothing})


NAMES = [
    f"{base}{layers}.{layer}.{module}"
    for base, layers, modules in (
        ("model.", "layers", ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")),
        ("transformer.", "h", ("attn.c_attn", "attn.c_proj", "mlp.c_proj")),
    )
    for layer in (0, 1, 2, 10, 12)
    for module in modules
] + ["lm_head", "model.embed_tokens"]
PATTERNS = [
    "q_proj", "proj", "c_proj", "mlp.c_proj", "self_attn.q_proj", "0.self_attn.q_proj",
    "layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", r".*\.1\.mlp\..*", r"layers\.\d\..*",
    "^model.layers.10.*", ".*", "h.[12].*", "layers.1.*", "lm_head", "gate_proj|up_proj",
]  # fmt: skip
_some = st.lists(st.sampled_from(PATTERNS), max_size=4, unique=True)


@given(patterns=_some)
def test_patterns_match_as_in_peft(patterns: list[str]) -> None:
    ranks = {pattern: index + 1 for index, pattern in enumerate(patterns)}
    alphas = {pattern: 10.0 * (index + 1) for index, pattern in enumerate(reversed(patterns))}
    values = {"peft_type": "LORA", "r": 64, "lora_alpha": 3, "rank_pattern": ranks, "alpha_pattern": alphas}
    config = PeftConfig.from_values(values)
    for name in NAMES:
        rank = ranks.get(get_pattern_key(ranks, name), 64)
        alpha = alphas.get(get_pattern_key(alphas, name), 3)
        assert (config.rank(name), config.scale(name)) == (rank, alpha / rank)
        assert client._scale(values, name, rank) == alpha / rank


@given(
    targets=st.one_of(_some.filter(bool), st.sampled_from(PATTERNS)),
    excluded=st.one_of(st.none(), _some, st.sampled_from(PATTERNS)),
    layers=st.one_of(st.none(), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=3)),
    pattern=st.sampled_from([None, "", [], "layers", "h", ["h", "layers"], "blocks"]),
)
def test_targets_equal_the_modules_that_peft_adapts(
    targets: Any, excluded: Any, layers: Any, pattern: Any
) -> None:
    if isinstance(targets, str):
        layers = None
    if layers is None:
        pattern = None
    options = {
        "target_modules": targets,
        "exclude_modules": excluded,
        "layers_to_transform": layers,
        "layers_pattern": pattern,
    }
    theirs = peft.LoraConfig(**options)
    ours = PeftConfig.from_values({"peft_type": "LORA", **options})
    for name in NAMES:
        assert ours.is_target(name) == bool(check_target_module_exists(theirs, name)), name


def test_every_field_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/adapters.md").read_text()
    table = page.split("## Fields of adapter_config.json")[1].split("## ")[0]
    assert {name for name in [*HONOURED, *HARMLESS, *REFUSED] if f"`{name}`" not in table} == set()
