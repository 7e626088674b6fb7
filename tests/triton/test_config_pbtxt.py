"""config.pbtxt files match the tables, and Triton's own schema can parse them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight.config import PARAMETERS, Parameters, Role
from inflight.parameter_reader import is_filled, read_parameters
from inflight.triton.config_pbtxt import LLMAPI, MODELS, TEMPLATES, ModelSpec, render, write, write_llmapi
from tests.triton import upstream_files
from tests.triton.upstream_files import DOCUMENTED, fill_template

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
TEMPLATED = [model for model in MODELS if model.template]


def parsed(model: ModelSpec) -> model_config_pb2.ModelConfig:
    return text_format.Parse(render(model), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_files_match_the_tables(model: ModelSpec) -> None:
    text = (REPOSITORY / model.name / "config.pbtxt").read_text(encoding="utf-8")
    assert text == render(model), "run scripts/write_configs"


@pytest.mark.parametrize("model", TEMPLATED, ids=lambda model: model.name)
def test_the_templates_match_the_tables(model: ModelSpec) -> None:
    folder = ROOT / TEMPLATES / model.name
    assert model.template is not None
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    assert text == render(model, model.template), "run scripts/write_configs"
    code = (REPOSITORY / model.name / "1" / "model.py").read_text(encoding="utf-8")
    assert (folder / "1" / "model.py").read_text(encoding="utf-8") == code, "run scripts/write_configs"


def test_the_model_without_a_batch_dimension_matches_the_tables(tmp_path: Path) -> None:
    write_llmapi(tmp_path, REPOSITORY)
    written = tmp_path / "tensorrt_llm"
    for name in ("config.pbtxt", "1/model.py"):
        there = (ROOT / LLMAPI / "tensorrt_llm" / name).read_text(encoding="utf-8")
        assert there == (written / name).read_text(encoding="utf-8"), "run scripts/write_configs"
    config = text_format.Parse((written / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert not any(tensor.HasField("reshape") for tensor in config.input)
    parameters = read_parameters(
        {"name": "tensorrt_llm", "max_batch_size": config.max_batch_size}, Role.ENGINE
    )
    assert parameters.engine.max_num_sequences == 64


def filled(name: str, arguments: str) -> tuple[model_config_pb2.ModelConfig, Parameters]:
    """Fill a template with an upstream command line; return the parsed file and the model's parameters."""
    text = (ROOT / TEMPLATES / name / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(fill_template(text, arguments), model_config_pb2.ModelConfig())
    given = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    role = next(model.role for model in MODELS if model.name == name)
    return config, read_parameters(
        {"name": name, "max_batch_size": config.max_batch_size, "parameters": given}, role
    )


@pytest.mark.parametrize(("name", "arguments"), DOCUMENTED)
def test_upstreams_documented_command_lines_fill_the_templates(name: str, arguments: str) -> None:
    config, _ = filled(name, arguments)
    assert config.name == name and config.backend == "python"
    assert config.max_batch_size in (4, 64)


def test_template_variables_set_their_parameters() -> None:
    arguments = (
        "triton_backend:tensorrtllm,triton_max_batch_size:7,decoupled_mode:False,logits_datatype:TYPE_FP16,"
        "max_queue_size:9,max_queue_delay_microseconds:100,engine_dir:/models/x,batching_strategy:v1,"
        "normalize_log_probs:True,decoding_mode:top_k_top_p,lora_cache_max_adapter_size:64"
    )
    config, parameters = filled("tensorrt_llm", arguments)
    assert not config.model_transaction_policy.decoupled
    logits = {"draft_logits", "context_logits", "generation_logits"}
    assert {t.name for t in (*config.input, *config.output) if t.name in logits} == logits
    for tensor in (*config.input, *config.output):
        assert tensor.name not in logits or tensor.data_type == model_config_pb2.TYPE_FP16
    assert (parameters.engine.max_num_sequences, parameters.scheduler.max_queue_size) == (7, 9)
    assert (parameters.engine.gpt_model_path, parameters.gpt_model_type) == ("/models/x", "V1")
    assert parameters.engine.normalize_log_probs
    for name in ("preprocessing", "postprocessing"):
        config, _ = filled(
            name,
            f"triton_max_batch_size:7,{name}_instance_count:3,max_queue_size:9,max_queue_delay_microseconds:100",
        )
        assert config.instance_group[0].count == 3
        assert config.dynamic_batching.max_queue_delay_microseconds == 100
        assert config.dynamic_batching.default_queue_policy.max_queue_size == 9


@pytest.mark.parametrize(("name", "kind"), upstream_files.TENSORS)
def test_upstreams_tensors_are_declared_with_upstreams_types_and_dims(name: str, kind: str) -> None:
    model = next(model for model in MODELS if model.name == name)
    rows = dict((model.inputs if kind == "input" else model.outputs).declared(model.vocabulary))
    for line in upstream_files.TENSORS[name, kind].split(";"):
        tensor, dtype, dims = line.split()
        spec = rows[tensor]
        assert dtype in ("*", spec.dtype, *spec.other_dtypes), tensor
        # Upstream's own converter writes four numbers per row for DoRA.
        wanted = {"lora_config": "-1,-1"}.get(tensor, dims)
        assert ",".join(map(str, spec.dims or (1,))) == wanted, tensor


@pytest.mark.parametrize("name", upstream_files.PARAMETERS)
def test_a_config_with_all_parameters_of_upstream_loads(name: str) -> None:
    keys = upstream_files.PARAMETERS[name].split()
    given = {key: {"string_value": upstream_files.FILLED.get(key, f"${{{key}}}")} for key in keys}
    role = next(model.role for model in MODELS if model.name == name)
    parameters = read_parameters({"name": name, "max_batch_size": 4, "parameters": given}, role)
    assert parameters.engine.normalize_log_probs == (name == "tensorrt_llm")


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
    """The model reports missing inputs in words, and a stop request needs no other inputs."""
    assert all(tensor.optional for tensor in parsed(model).input)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_parameter_is_declared_and_the_file_loads(model: ModelSpec) -> None:
    config = parsed(model)
    assert set(config.parameters) == {spec.key for spec in PARAMETERS if model.role in spec.roles}
    given = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    model_config = {"name": config.name, "max_batch_size": config.max_batch_size, "parameters": given}
    assert read_parameters(model_config, model.role).engine.max_num_sequences == config.max_batch_size


def test_template_variables_are_distinct() -> None:
    engine = parsed(MODELS[0])
    unfilled = [
        value.string_value for value in engine.parameters.values() if not is_filled(value.string_value)
    ]
    assert len(unfilled) == len(set(unfilled))


def test_only_the_streaming_models_are_decoupled() -> None:
    decoupled = {model.name for model in MODELS if parsed(model).model_transaction_policy.decoupled}
    assert decoupled == {"tensorrt_llm", "ensemble", "tensorrt_llm_bls"}


def test_a_config_pbtxt_is_written_for_every_model(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.parent.name for path in tmp_path.glob("*/config.pbtxt")} == {model.name for model in MODELS}
