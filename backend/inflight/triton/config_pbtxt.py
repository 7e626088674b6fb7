"""Write every model's config.pbtxt from the tables of tensors and parameters.

The files in `model_repository` can be loaded by Triton as they are. The files of five models in
`all_models/inflight_batcher_llm` are templates for tensorrtllm_backend's `fill_template.py`.
`all_models/llmapi` has `tensorrt_llm` without a batch dimension. This module owns the layout of the files,
and which model declares which tensors and parameters. It imports neither numpy nor Triton.
`scripts/write_configs` runs it, and a test checks that the files equal its output.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from inflight.config import PARAMETERS, ParameterSpec, Role
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import TensorSpec, TensorTable, Vocabulary
from inflight.tensors.text_model_tables import (
    ENCODERS_INPUTS,
    ENCODERS_OUTPUTS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
)

DEFAULT_MAX_BATCH_SIZE = 64

TEMPLATES = Path("all_models", "inflight_batcher_llm")
"""Folder of the templates, relative to the checkout's root; the same path as in tensorrtllm_backend."""

LLMAPI = Path("all_models", "llmapi")
"""Folder of the model without a batch dimension; the same path as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Values of the fields of a config.pbtxt that are not strings.

    In a template these values can be variables such as `${decoupled_mode}`; the file is invalid protobuf
    until the variables are filled in.

    Attributes:
        max_batch_size: Value of `max_batch_size`.
        decoupled: Value of `decoupled` for models that may be decoupled.
        instances: Number of instances in the instance group.
        logits: Data type of logits.
        batching: Lines that configure a dynamic batcher for the model.
    """

    max_batch_size: str = str(DEFAULT_MAX_BATCH_SIZE)
    decoupled: str = "true"
    instances: str = "1"
    logits: str = "TYPE_FP32"
    batching: tuple[str, ...] = ()


_FILLED = Fields()
_BATCH_SIZE, _LOGITS = "${triton_max_batch_size}", "${logits_datatype}"
_QUEUE = (
    "dynamic_batching {",
    f"  preferred_batch_size: [ {_BATCH_SIZE} ]",
    "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}",
    "  default_queue_policy { max_queue_size: ${max_queue_size} }",
    "}",
)
_UPSTREAMS_VARIABLES = {"tensorrt_llm_model_name": Role.BLS}
"""Parameters that are template variables, under tensorrtllm_backend's names, only in models of the given role."""
_LOGITS_TENSORS = frozenset({"draft_logits", "context_logits", "generation_logits"})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One folder of the model repository.

    Attributes:
        name: Name of the folder and of the model.
        summary: First line of the file.
        role: Role that decides which parameters the model takes.
        inputs: Table of inputs.
        outputs: Table of outputs.
        vocabulary: The set of tensor names that the model uses, one of two.
        decoupled: Whether one request may have several responses.
        template: Field values of the template; None if tensorrtllm_backend has no such model.
    """

    name: str
    summary: str
    role: Role
    inputs: TensorTable = INPUTS
    outputs: TensorTable = OUTPUTS
    vocabulary: Vocabulary = Vocabulary.TOKENS
    decoupled: bool = False
    template: Fields | None = None


MODELS: tuple[ModelSpec, ...] = (
    ModelSpec(
        "tensorrt_llm",
        "Token ids or text in and out; holds the engine.",
        Role.ENGINE,
        decoupled=True,
        template=Fields(_BATCH_SIZE, "${decoupled_mode}", logits=_LOGITS),
    ),
    ModelSpec(
        "tensorrt_llm_infer",
        "The tensors of tensorrt_llm with exactly one response, for HTTP infer and unary gRPC.",
        Role.FRONT_END,
    ),
    ModelSpec(
        "ensemble",
        "Text in, text out, under the names of tensorrtllm_backend's ensemble.",
        Role.FRONT_END,
        vocabulary=Vocabulary.TEXT,
        decoupled=True,
        template=Fields(_BATCH_SIZE, logits=_LOGITS),
    ),
    ModelSpec(
        "tensorrt_llm_bls",
        "As ensemble, and another model may draft tokens; the text of a stream may accumulate.",
        Role.BLS,
        vocabulary=Vocabulary.TEXT,
        decoupled=True,
        template=Fields(_BATCH_SIZE, "${decoupled_mode}", instances="${bls_instance_count}", logits=_LOGITS),
    ),
    ModelSpec(
        "preprocessing",
        "Text to token ids.",
        Role.PREPROCESSING,
        PREPROCESSING_INPUTS,
        PREPROCESSING_OUTPUTS,
        template=Fields(_BATCH_SIZE, instances="${preprocessing_instance_count}", batching=_QUEUE),
    ),
    ModelSpec(
        "postprocessing",
        "Token ids to text.",
        Role.POSTPROCESSING,
        POSTPROCESSING_INPUTS,
        POSTPROCESSING_OUTPUTS,
        template=Fields(_BATCH_SIZE, instances="${postprocessing_instance_count}", batching=_QUEUE),
    ),
    ModelSpec(
        "multimodal_encoders",
        "Pictures to rows of embeddings, with the vision tower of the checkpoint.",
        Role.ENCODERS,
        ENCODERS_INPUTS,
        ENCODERS_OUTPUTS,
    ),
)


def render(model: ModelSpec, fields: Fields = _FILLED) -> str:
    """Return the text of the model's config.pbtxt."""
    head = [
        f"# {model.summary}",
        "# Generated by scripts/write_configs from inflight.config and the tables of tensors in inflight.tensors.",
        f'name: "{model.name}"',
        'backend: "python"',
        *_max_batch_size(model, fields),
        *([f"model_transaction_policy {{ decoupled: {fields.decoupled} }}"] if model.decoupled else []),
        *fields.batching,
        f"instance_group [ {{ count: {fields.instances} kind: KIND_CPU }} ]",
    ]
    inputs = [_tensor(*row, model, fields) for row in model.inputs.declared(model.vocabulary)]
    outputs = [_tensor(*row, model, fields, True) for row in model.outputs.declared(model.vocabulary)]
    parameters = [
        _parameter(spec, fields is not _FILLED and _UPSTREAMS_VARIABLES.get(spec.key) is model.role)
        for spec in PARAMETERS
        if model.role in spec.roles
    ]
    return "\n".join(
        [*head, "", *_section("input", inputs), "", *_section("output", outputs), "", *parameters, ""],
    )


def _max_batch_size(model: ModelSpec, fields: Fields) -> list[str]:
    line = f"max_batch_size: {fields.max_batch_size}"
    if model.role is not Role.ENGINE:
        return [line]
    return ["# Most sequences in one iteration, and most prompts in one request.", line]


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    entries = [row for row, _ in rows]
    lines = [f"  {row}," for row in entries[:-1]] + [f"  {entries[-1]}"]
    return [f"{title} [", *(f"{line}  # {meaning}" for line, (_, meaning) in zip(lines, rows)), "]"]


def _tensor(
    name: str, spec: TensorSpec, model: ModelSpec, fields: Fields, is_output: bool = False
) -> tuple[str, str]:
    data_type = "TYPE_STRING" if spec.dtype == "BYTES" else f"TYPE_{spec.dtype}"
    if name in _LOGITS_TENSORS:
        data_type = fields.logits
    dims = ", ".join(str(length) for length in spec.dims or (1,))
    # Reshaping to an empty shape turns [1, 1] on the wire into [1] in the model.
    reshape = " reshape { shape: [ ] }" if spec.scalar and fields.max_batch_size != "0" else ""
    optional = "" if is_output else " optional: true"
    row = f'{{ name: "{name}" data_type: {data_type} dims: [ {dims} ]{reshape}{optional} }}'
    main_name = spec.names(model.vocabulary)[0]
    meaning = spec.meaning if name == main_name else f"alias of {main_name}"
    return row, meaning if spec.built else f"{meaning} (not available yet)"


def _parameter(spec: ParameterSpec, is_variable: bool) -> str:
    comment = "# " + "; ".join(filter(None, (spec.meaning, spec.expectation)))
    variable = f"${{{spec.template or spec.key}}}"
    value = variable if is_variable else spec.template_value or variable
    return f'{comment}\nparameters {{ key: "{spec.key}" value {{ string_value: "{value}" }} }}'


def write(repository: Path) -> None:
    """Write the config.pbtxt of every model below `repository`."""
    for model in MODELS:
        _write_config(repository / model.name, render(model))


def write_templates(folder: Path, repository: Path) -> None:
    """Write the templates below `folder`, each with its model's model.py from `repository`."""
    for model in MODELS:
        if model.template is not None:
            _write_config(folder / model.name, render(model, model.template))
            version = folder / model.name / "1"
            version.mkdir(exist_ok=True)
            shutil.copyfile(repository / model.name / "1" / "model.py", version / "model.py")


def write_llmapi(folder: Path, repository: Path) -> None:
    """Write llmapi's variant of `tensorrt_llm` below `folder`: no batch dimension, one response."""
    model = MODELS[0]
    _write_config(folder / model.name, render(model, Fields("0", "false")))
    version = folder / model.name / "1"
    version.mkdir(exist_ok=True)
    shutil.copyfile(repository / model.name / "1" / "model.py", version / "model.py")


def _write_config(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write every model's config.pbtxt.")
    parser.add_argument("root", type=Path, help="folder of the checkout")
    root = parser.parse_args().root
    write(root / "model_repository")
    write_templates(root / TEMPLATES, root / "model_repository")
    write_llmapi(root / LLMAPI, root / "model_repository")
