"""The names of additional outputs in the parameter and in tensors."""

from __future__ import annotations

import pytest

from inflight.additional_outputs import (
    Meaning,
    OutputKind,
    WantedOutput,
    meaning_of,
    outputs_of_tensors,
    parse_outputs,
    tensor_names,
)
from inflight.config import EngineConfig, Role
from inflight.errors import ConfigError
from inflight.parameter_reader import read_parameters


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("last_hidden_state", Meaning(OutputKind.LAST_HIDDEN_STATE)),
        ("hidden_states_0", Meaning(OutputKind.HIDDEN_STATES, 0)),
        ("hidden_states_31", Meaning(OutputKind.HIDDEN_STATES, 31)),
        ("top_5_logits", Meaning(OutputKind.TOP_LOGITS, 5)),
        ("top_20_logit_ids", Meaning(OutputKind.TOP_LOGIT_IDS, 20)),
    ],
)
def test_names_of_additional_outputs_are_parsed(name: str, meaning: Meaning) -> None:
    assert meaning_of(name) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "TopKLogits", "hidden_states_", "hidden_states_01", "hidden_states_-1", "top_0_logits", "top_5_logits_ids",
        "last_hidden_state:generation", "last_hidden_state last_hidden_state", "last_hidden_state,",
        "top_5_logits, top_5_logits:context",
    ],
)  # fmt: skip
def test_unknown_output_names_are_refused_at_load(text: str) -> None:
    with pytest.raises(ValueError):
        parse_outputs(text)
    config = {"max_batch_size": 4, "parameters": {"additional_model_outputs": {"string_value": text}}}
    with pytest.raises(ConfigError, match=r"additional_model_outputs: got .*, expected any of last_hid"):
        read_parameters(config, Role.ENGINE)


def test_a_programs_unknown_output_name_is_refused() -> None:
    config = EngineConfig("x", additional_model_outputs=(WantedOutput("TopKLogits"),))
    with pytest.raises(ConfigError, match=r"additional_model_outputs is .*TopKLogits.*, expected any of"):
        config.validate()


def test_each_additional_output_has_a_context_and_a_generation_tensor() -> None:
    outputs = parse_outputs("last_hidden_state:context, top_5_logits")
    assert outputs == (
        WantedOutput("last_hidden_state", True),
        WantedOutput("top_5_logits"),
    )
    names = [
        ("context_last_hidden_state", 2),
        ("generation_last_hidden_state", 3),
        ("generation_top_5_logits", 3),
    ]
    assert tensor_names(outputs) == names
    assert outputs_of_tensors(name for name, _ in names) == outputs
    assert outputs_of_tensors(["context_last_hidden_state"]) == outputs[:1]
