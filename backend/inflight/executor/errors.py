"""Errors of the Executor API: InflightErrors that are RuntimeErrors too, as in TensorRT-LLM's bindings."""

from __future__ import annotations

from typing import TypeVar

from inflight.core.request.sampling_config import CONTROLS
from inflight.errors import InflightError

_E = TypeVar("_E", bound=InflightError)

_FIELD_OF_TENSOR = {
    **{each.tensor: each.executor.name for each in CONTROLS.values() if each.executor},
    "request_output_len": "max_tokens",
    "input_ids": "input_token_ids",
    "stop_words_list": "stop_words",
    "bad_words_list": "bad_words",
    "guided_decoding_guide_type": "guided_decoding_params.guide_type",
    "guided_decoding_guide": "guided_decoding_params.guide",
    "draft_input_ids": "external_draft_tokens_config.tokens",
    "draft_logits": "external_draft_tokens_config.logits",
    "draft_acceptance_threshold": "external_draft_tokens_config.acceptance_threshold",
    "additional_outputs": "output_config.additional_model_outputs",
    "prompt_embedding_table": "prompt_tuning_config.embedding_table",
    "prompt_table_extra_ids": "prompt_tuning_config.input_token_extra_ids",
    "lora_task_id": "lora_config.task_id",
}
"""Field of a Request by tensor: errors of the engine name tensors, which programs of this API do not know."""


def in_fields(error: _E) -> _E:
    """Convert an error of the engine, which names tensors, to an error that names fields of a Request."""
    return error.with_names(lambda name: _FIELD_OF_TENSOR.get(name, name))


class ExecutorError(InflightError, RuntimeError):
    """A failed call of the API."""


class InvalidValue(ExecutorError, ValueError):
    """A value outside the range of its field, or two fields that contradict each other."""

    code = "INVALID_ARG"


class NotSupported(ExecutorError):
    """A feature of TensorRT-LLM's API that this engine does not have."""

    code = "UNSUPPORTED"
