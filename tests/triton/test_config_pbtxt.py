"""config.pbtxt says what the tables say, and Triton's own schema can read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight.triton.config_pbtxt import MODELS, ModelSpec, render, write
from inflight.triton.parameters import PARAMETERS, is_filled, read_parameters

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def parsed(model: ModelSpec) -> model_config_pb2.ModelConfig:
    return text_format.Parse(render(model), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_files_are_what_the_tables_say(model: ModelSpec) -> None:
    text = (REPOSITORY / model.name / "config.pbtxt").read_text(encoding="utf-8")
    assert text == render(model), "run scripts/write_configs"


def test_every_folder_of_the_repository_is_a_known_model() -> None:
    assert {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")} == {
        model.name for model in MODELS
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tensors_are_declared_as_in_the_table(model: ModelSpec) -> None:
    config = parsed(model)
    for declared, table in ((config.input, model.inputs), (config.output, model.outputs)):
        rows = dict(table.declared(model.vocabulary))
        assert [tensor.name for tensor in declared] == list(rows)
        for tensor in declared:
            spec = rows[tensor.name]
            data_type = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            assert data_type.replace("STRING", "BYTES") == spec.dtype
            assert tuple(tensor.dims) == (spec.dims or (1,))
            assert tensor.HasField("reshape") == spec.scalar
            assert not tensor.reshape.shape


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_no_input_is_required_by_triton(model: ModelSpec) -> None:
    """So that what is missing is said in words, and a stop request needs nothing else."""
    assert all(tensor.optional for tensor in parsed(model).input)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_parameter_is_there_and_the_file_loads(model: ModelSpec) -> None:
    config = parsed(model)
    assert set(config.parameters) == {spec.key for spec in PARAMETERS if model.role in spec.roles}
    given = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    model_config = {"name": config.name, "max_batch_size": config.max_batch_size, "parameters": given}
    assert read_parameters(model_config, model.role).max_num_sequences == config.max_batch_size


def test_template_variables_are_distinct() -> None:
    engine = parsed(MODELS[0])
    unfilled = [
        value.string_value for value in engine.parameters.values() if not is_filled(value.string_value)
    ]
    assert len(unfilled) == len(set(unfilled))


def test_which_models_are_decoupled() -> None:
    decoupled = {model.name for model in MODELS if parsed(model).model_transaction_policy.decoupled}
    assert decoupled == {"tensorrt_llm", "ensemble"}


def test_write(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.parent.name for path in tmp_path.glob("*/config.pbtxt")} == {model.name for model in MODELS}
