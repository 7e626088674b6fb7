"""Arguments that Triton passes to a model when it loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.config import Role
from inflight.errors import ConfigError
from inflight.triton.host import ModelArgs, read_model_args
from tests.triton.factories import make_model_config


def read(role: Role = Role.ENGINE, **config: object) -> ModelArgs:
    args = {
        "model_config": json.dumps({**make_model_config(), **config}),
        "model_name": "a_model",
        "model_repository": "/models/a_model",
        "model_version": "3",
    }
    return read_model_args(args, role)


def test_name_folder_and_decoupling_are_read():
    args = read()
    assert (args.name, args.version_dir, args.decoupled) == ("a_model", Path("/models/a_model/3"), True)
    assert not read(model_transaction_policy={}).decoupled


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [{}],
        [{"count": 1, "kind": "KIND_CPU"}],
        [{"count": 1, "gpus": []}],
        [{"count": 1, "gpus": [3]}],
    ],
)
def test_an_engine_with_one_instance_is_accepted(groups):
    assert read(instance_group=groups).name == "a_model"


@pytest.mark.parametrize(
    "groups", [[{"count": 2}], [{"count": 1}, {"count": 1}], [{"count": 1, "gpus": [0, 1]}]]
)
def test_an_engine_of_two_instances_is_refused(groups):
    """The second instance would replace the first."""
    with pytest.raises(ConfigError, match="instance_group: got 2 instances, expected 1"):
        read(instance_group=groups)


def test_a_front_end_may_have_several_instances():
    assert read(Role.FRONT_END, instance_group=[{"count": 2}]).name == "a_model"


def outputs_of(**dtypes: str) -> list[dict[str, str]]:
    return [{"name": name, "data_type": dtype} for name, dtype in dtypes.items()]


def test_logits_may_be_declared_in_half_precision():
    args = read(output=outputs_of(context_logits="TYPE_FP16", text_output="TYPE_STRING"))
    assert args.outputs == {"context_logits": "FP16", "text_output": "BYTES"}


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("generation_logits", "TYPE_BF16", "TYPE_FP32 or TYPE_FP16"),
        ("output_ids", "TYPE_INT64", "TYPE_INT32"),
    ],
)
def test_an_unsupported_type_of_an_output_is_refused(name, dtype, expected):
    with pytest.raises(ConfigError, match=f"declares output {name} as {dtype}, expected {expected}"):
        read(output=outputs_of(**{name: dtype}))


def test_parameters_without_effect_are_logged(caplog):
    caplog.set_level("INFO", "inflight")
    parameters = {"decoding_mode": {"string_value": "auto"}}
    read(parameters=parameters)
    assert (
        "parameter decoding_mode is 'auto' and has no effect: the mode follows from each request"
        in caplog.text
    )


def test_nodes_of_a_draft_tree_that_are_not_drafted_are_logged(caplog):
    caplog.set_level("INFO", "inflight")
    values = {"eagle_choices": "{0}, {1}, {0, 0}", "speculative_decoding_mode": "mtp"}
    read(parameters={key: {"string_value": text} for key, text in values.items()})
    assert "drafted, up to 2 tokens; other nodes of the tree (1) have no effect" in caplog.text


def declared_inputs(data_type: str) -> dict[str, object]:
    return {
        "input": [{"name": "lora_weights", "data_type": data_type}, {"name": "end_id", "data_type": "INT32"}],
        "parameters": {"lora_weights_data_type": {"string_value": "TYPE_BF16"}},
    }


def test_an_inputs_declared_type_matches_its_parameter():
    assert read(**declared_inputs("TYPE_BF16")).parameters.lora_weights_data_type == "TYPE_BF16"
    with pytest.raises(
        ConfigError, match=r"lora_weights_data_type is TYPE_BF16, but .* lora_weights as TYPE_FP16"
    ):
        read(**declared_inputs("TYPE_FP16"))


def prompt_table_args(data_type: str | None, declared: str) -> dict[str, str]:
    said = {} if data_type is None else {"prompt_embedding_table_data_type": {"string_value": data_type}}
    config = {
        "name": "ensemble",
        "max_batch_size": 4,
        "parameters": said,
        "input": [{"name": "prompt_embedding_table", "data_type": declared, "dims": [-1, -1]}],
    }
    place = {"model_name": "ensemble", "model_repository": "x", "model_version": "1"}
    return {"model_config": json.dumps(config), **place}


def test_the_declared_type_of_a_prompt_table_must_match_the_parameter() -> None:
    for said, declared in ((None, "TYPE_FP32"), ("TYPE_BF16", "TYPE_BF16"), ("${x}", "TYPE_FP16")):
        read_model_args(prompt_table_args(said, declared), Role.FRONT_END)
    problem = r"is TYPE_BF16, but config\.pbtxt declares the input prompt_embedding_table as TYPE_FP16"
    with pytest.raises(ConfigError, match=problem):
        read_model_args(prompt_table_args("TYPE_BF16", "TYPE_FP16"), Role.FRONT_END)
