"""Factories with keyword defaults: inputs of requests, readers and contexts for them, and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.prompt import Prompt, ReplyOptions
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.reader import NUMPY_TYPES, TensorReader
from inflight.tensors.requests import ServingContext
from inflight.tensors.spec import TensorSpec, Vocabulary
from inflight.tensors.wanted_outputs import Naming
from inflight.text.text_encoder import NO_TEXT

ALL_OUTPUTS = frozenset(spec.name for spec in OUTPUTS.specs)


def scalar(name: str, value: object, vocabulary: Vocabulary = Vocabulary.TOKENS) -> np.ndarray:
    """Return a scalar as a model receives it: shape [1], in the table's type. `name` may be an alias."""
    return np.array([value], dtype=numpy_type(name, vocabulary))


def array(name: str, value: object, vocabulary: Vocabulary = Vocabulary.TOKENS) -> np.ndarray:
    """Return an array as a model receives it; the caller includes the batch dimension."""
    return np.array(value, dtype=numpy_type(name, vocabulary))


def numpy_type(name: str, vocabulary: Vocabulary = Vocabulary.TOKENS) -> type:
    return NUMPY_TYPES[dict(INPUTS.declared(vocabulary))[name].dtype]


def token_inputs(**tensors: object) -> dict[str, np.ndarray]:
    """Return the inputs of a small request with ids; scalars may be Python values, None omits a default."""
    given: dict[str, object] = {"input_ids": [[5, 6, 7]], "request_output_len": 4} | tensors
    return as_inputs(given, Vocabulary.TOKENS)


def text_inputs(**tensors: object) -> dict[str, np.ndarray]:
    """Return the inputs of a small request with the names of `ensemble`."""
    given: dict[str, object] = {"text_input": b"hello", "max_tokens": 4} | tensors
    return as_inputs(given, Vocabulary.TEXT)


def as_inputs(given: dict[str, object], vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    made = {}
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            made[name] = value
        elif value is not None:
            make = array if isinstance(value, list) else scalar
            made[name] = make(name, value, vocabulary)
    return made


def wire(spec: TensorSpec, value: object) -> np.ndarray:
    """Return an array in the row's shape whose elements are all `value`."""
    shape = [3 if length == -1 else length for length in spec.dims]
    return np.full([1, *shape], value, dtype=NUMPY_TYPES[spec.dtype])


def make_reader(
    inputs: dict[str, np.ndarray] | None = None, vocabulary: Vocabulary = Vocabulary.TOKENS
) -> TensorReader:
    inputs = token_inputs() if inputs is None else inputs
    return TensorReader(inputs, INPUTS, vocabulary)


def make_rows(
    inputs: dict[str, np.ndarray] | None = None, vocabulary: Vocabulary = Vocabulary.TOKENS
) -> list[TensorReader]:
    return make_reader(inputs, vocabulary).rows()


def make_limits(**changes: int) -> ModelLimits:
    return replace(
        ModelLimits(
            1000,
            max_sequence_length=64,
            max_input_length=60,
            num_blocks=64,
            tokens_per_block=8,
            max_beam_width=4,
            max_adapter_rank=64,
            max_draft_length=8,
            logits_post_processors=("upper",),
        ),
        **changes,
    )


def make_description(**changes: object) -> EngineDescription:
    return replace(EngineDescription(make_limits(), eos_token_ids=(2, 3)), **changes)


def make_context(**changes: object) -> ServingContext:
    return replace(
        ServingContext(
            make_description(),
            decoupled=True,
            exclude_input_in_output=False,
            naming=Naming(ALL_OUTPUTS, named=False),
            encoder=NO_TEXT,
        ),
        **changes,
    )


def make_prompt(
    outputs: frozenset[str] = ALL_OUTPUTS, options: dict[str, object] | None = None, **request: object
) -> Prompt:
    return Prompt(make_request(**request), ReplyOptions(outputs, **(options or {})))


def make_result(
    ids: Sequence[int] = (8, 9), reason: FinishReason = FinishReason.NOT_FINISHED, **changes: object
) -> SequenceResult:
    """Return a result of one sequence; with a finish reason it is the last."""
    result = SequenceResult(
        (tuple(ids),),
        num_input_tokens=3,
        num_output_tokens=(len(ids),),
        finish_reasons=(reason,),
        is_sequence_final=reason is not FinishReason.NOT_FINISHED,
    )
    return replace(result, **changes)


def make_beams(
    *beams: Sequence[int], reason: FinishReason = FinishReason.LENGTH, **changes: object
) -> SequenceResult:
    """Return the beams of one search, best first."""
    result = SequenceResult(
        tuple(tuple(ids) for ids in beams),
        num_input_tokens=3,
        num_output_tokens=tuple(len(ids) for ids in beams),
        finish_reasons=(reason,) * len(beams),
        is_sequence_final=reason is not FinishReason.NOT_FINISHED,
    )
    return replace(result, **changes)


def make_request(**changes: object) -> Request:
    return replace(Request(0, (5, 6, 7), max_new_tokens=4), **changes)
