"""Every row of the table both ways: what it makes of a request, or that only its neutral values pass."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.request import Request
from inflight.errors import Unsupported
from inflight.testing.fake_pb_utils import FakePbUtils
from inflight.triton.requests import FrontEndOptions, convert, wants_stop
from inflight.triton.responses import ResponseBuilder
from inflight.triton.tensor_reader import NUMPY_TYPES
from inflight.triton.tensor_spec import NeutralRule, TensorSpec, Vocabulary
from inflight.triton.tensors import INPUTS, OUTPUTS
from tests.triton.factories import (
    ALL_OUTPUTS,
    make_context,
    make_options,
    make_reader,
    make_result,
    text_inputs,
    token_inputs,
    wire,
)

UNBUILT = [spec for spec in INPUTS.specs if not spec.built]
REFUSABLE = [spec for spec in UNBUILT if spec.neutral and spec.neutral.rule is not NeutralRule.ANY]
BUILT = {spec.name for spec in INPUTS.specs if spec.built}


def converted(
    vocabulary: Vocabulary = Vocabulary.TOKENS, **tensors: object
) -> tuple[Request, FrontEndOptions]:
    inputs = token_inputs(**tensors) if vocabulary is Vocabulary.TOKENS else text_inputs(**tensors)
    return convert(make_reader(inputs, vocabulary), ALL_OUTPUTS, make_context(), lambda text: [len(text)])


# The specification's tables, name for name: (data type, rank with the batch dimension).
SPECIFIED_INPUTS = {
    "request_output_len": ("INT32", 2),
    "input_ids": ("INT32", 2),
    "streaming": ("BOOL", 2),
    "beam_width": ("INT32", 2),
    "temperature": ("FP32", 2),
    "runtime_top_k": ("INT32", 2),
    "runtime_top_p": ("FP32", 2),
    "len_penalty": ("FP32", 2),
    "early_stopping": ("INT32", 2),
    "repetition_penalty": ("FP32", 2),
    "min_length": ("INT32", 2),
    "presence_penalty": ("FP32", 2),
    "frequency_penalty": ("FP32", 2),
    "no_repeat_ngram_size": ("INT32", 2),
    "random_seed": ("UINT64", 2),
    "end_id": ("INT32", 2),
    "pad_id": ("INT32", 2),
    "embedding_bias": ("FP32", 2),
    "bad_words_list": ("INT32", 3),
    "stop_words_list": ("INT32", 3),
    "prompt_embedding_table": ("FP16", 3),
    "prompt_vocab_size": ("INT32", 2),
    "lora_task_id": ("UINT64", 2),
    "lora_weights": ("FP16", 3),
    "lora_config": ("INT32", 3),
    "return_log_probs": ("BOOL", 2),
    "return_context_logits": ("BOOL", 2),
    "return_generation_logits": ("BOOL", 2),
    "draft_input_ids": ("INT32", 2),
    "draft_logits": ("FP32", 3),
}
SPECIFIED_OUTPUTS = {
    "output_ids": ("INT32", 3),
    "sequence_length": ("INT32", 2),
    "output_log_probs": ("FP32", 3),
    "cum_log_probs": ("FP32", 2),
    "context_logits": ("FP32", 3),
    "generation_logits": ("FP32", 4),
}


@pytest.mark.parametrize("name", SPECIFIED_INPUTS)
def test_the_specified_inputs_are_there(name: str) -> None:
    spec = INPUTS[name]
    assert (spec.dtype, max(len(spec.dims), 1) + 1) == SPECIFIED_INPUTS[name]


@pytest.mark.parametrize("name", SPECIFIED_OUTPUTS)
def test_the_specified_outputs_are_there(name: str) -> None:
    assert (OUTPUTS[name].dtype, len(OUTPUTS[name].dims) + 1) == SPECIFIED_OUTPUTS[name]


@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_names_are_distinct(vocabulary: Vocabulary) -> None:
    for table in (INPUTS, OUTPUTS):
        names = [name for name, _ in table.declared(vocabulary)]
        assert len(names) == len(set(names))


def test_data_types_are_known() -> None:
    assert {spec.dtype for spec in (*INPUTS.specs, *OUTPUTS.specs)} <= set(NUMPY_TYPES)


@pytest.mark.parametrize("spec", UNBUILT, ids=lambda spec: spec.name)
def test_what_is_not_built_is_accepted_at_its_neutral_values(spec: TensorSpec) -> None:
    plain = converted()
    for value in neutral_values(spec):
        for name in spec.names(Vocabulary.TOKENS):
            assert converted(**{name: value}) == plain


@pytest.mark.parametrize("spec", REFUSABLE, ids=lambda spec: spec.name)
def test_what_is_not_built_is_refused_at_any_other_value(spec: TensorSpec) -> None:
    for vocabulary in Vocabulary:
        for name in spec.names(vocabulary):
            value = wire(spec, b"x" if spec.dtype == "BYTES" else 7)
            with pytest.raises(Unsupported, match=rf"^{name} is not available .*send "):
                converted(vocabulary, **{name: value})


def neutral_values(spec: TensorSpec) -> list[np.ndarray]:
    assert spec.neutral is not None
    empty = np.zeros([1, 0], dtype=NUMPY_TYPES[spec.dtype])
    if spec.neutral.rule is NeutralRule.VALUES:
        return [empty, *(wire(spec, value) for value in spec.neutral.values)]
    if spec.neutral.rule is NeutralRule.NO_WORDS:
        return [empty, np.array([[[0], [-1]]], np.int32), np.array([[[7, 8], [-1, -1]]], np.int32)]
    if spec.neutral.rule is NeutralRule.NO_TEXT:
        return [empty, wire(spec, b"")]
    return [empty, wire(spec, 7)] if spec.neutral.rule is NeutralRule.ANY else [empty]


def test_neutral_values_are_said_as_a_client_has_to_send_them() -> None:
    assert str(INPUTS["no_repeat_ngram_size"].neutral) == "0 or 1073741824"
    assert str(INPUTS["return_log_probs"].neutral) == "false"
    assert str(INPUTS["runtime_top_p_min"].neutral) == "0 or 1e-06"


@pytest.mark.parametrize("name", ["embedding_bias_words", "embedding_bias_weights", "prompt_table_extra_id"])
def test_the_ensembles_own_tensors_are_there(name: str) -> None:
    assert INPUTS.sent_as(name, Vocabulary.TEXT) is not None


# (name, value, where it lands, what is there then)
LANDINGS = [
    ("input_ids", [[1, 2]], "input_token_ids", (1, 2)),
    ("input_lengths", 2, "input_token_ids", (5, 6)),
    ("request_output_len", 9, "max_new_tokens", 9),
    ("streaming", True, "streaming", True),
    ("end_id", 4, "end_ids", (4,)),
    ("pad_id", 0, "pad_id", 0),
    ("temperature", 0.5, "sampling.temperature", 0.5),
    ("runtime_top_k", 3, "sampling.top_k", 3),
    ("runtime_top_p", 0.5, "sampling.top_p", 0.5),
    ("random_seed", 2**64 - 1, "sampling.random_seed", 2**64 - 1),
    ("seed", 11, "sampling.random_seed", 11),
    ("exclude_input_in_output", True, "output.exclude_input_from_output", True),
    ("return_num_input_tokens", True, "return_num_input_tokens", True),
    ("return_num_output_tokens", True, "return_num_output_tokens", True),
]


def landed(pair: tuple[Request, FrontEndOptions], path: str) -> object:
    value: object = pair[0] if hasattr(pair[0], path.split(".")[0]) else pair[1]
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "value", "path", "expected"), LANDINGS, ids=lambda part: str(part))
def test_what_is_built_lands(name: str, value: object, path: str, expected: object) -> None:
    assert landed(converted(), path) != expected
    assert landed(converted(**{name: value}), path) == expected


def test_text_lands() -> None:
    request, options = converted(input_ids=None, text_input=b"four")
    assert (request.input_token_ids, options.prompt_text) == ((4,), "four")


def test_every_built_input_is_covered_above() -> None:
    assert {name for name, *_ in LANDINGS} - {"seed"} | {"text_input", "stop"} == BUILT


@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_stop(vocabulary: Vocabulary) -> None:
    for value, wanted in ((True, True), (False, False)):
        reader = make_reader({"stop": np.array([value])}, vocabulary)
        assert wants_stop(reader) is wanted
    assert not wants_stop(make_reader({}, vocabulary))


TEXT_LANDINGS = [
    ("max_tokens", 9, "max_new_tokens", 9),
    ("stream", True, "streaming", True),
    ("end_id", 4, "end_ids", (4,)),
    ("top_k", 3, "sampling.top_k", 3),
    ("top_p", 0.5, "sampling.top_p", 0.5),
    ("temperature", 0.5, "sampling.temperature", 0.5),
    ("seed", 11, "sampling.random_seed", 11),
    ("random_seed", 11, "sampling.random_seed", 11),
    ("exclude_input_in_output", True, "include_prompt", False),
]


@pytest.mark.parametrize(("name", "value", "path", "expected"), TEXT_LANDINGS, ids=lambda part: str(part))
def test_what_is_built_lands_under_the_names_of_ensemble(
    name: str, value: object, path: str, expected: object
) -> None:
    assert landed(converted(Vocabulary.TEXT), path) != expected
    assert landed(converted(Vocabulary.TEXT, **{name: value}), path) == expected


@pytest.mark.parametrize("spec", OUTPUTS.specs, ids=lambda spec: spec.name)
def test_outputs_come_in_their_type_and_rank(spec: TensorSpec) -> None:
    options = make_options(return_num_input_tokens=True, return_num_output_tokens=True)
    arrays = ResponseBuilder(FakePbUtils()).outputs(make_result(), options, "text").arrays()
    assert (spec.name in arrays) == spec.built
    if spec.built:
        assert arrays[spec.name].dtype == NUMPY_TYPES[spec.dtype]
        assert arrays[spec.name].ndim == len(spec.dims) + 1
