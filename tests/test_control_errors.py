"""An out-of-range sampling control is refused by every protocol, under that protocol's name of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import inflight.executor as trtllm
from inflight.core.request.control import Control
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InflightError, InvalidArgument, Name, error_from_kind
from inflight.executor.convert import to_core_request
from inflight.executor.errors import in_fields
from inflight.openai.errors import describe_error
from inflight.openai.kserve_client import KServeEngineClient
from inflight.openai.protocol import ChatBody, CompletionBody, SamplingBody
from inflight.tensors.spec import Vocabulary
from inflight_client.errors import server_error
from inflight_client.options import read_options
from tests.tensors.factories import make_limits, text_inputs, token_inputs
from tests.test_control_messages import LIMITS, said_of_a_body
from tests.triton.factories import make_triton_request
from tests.triton.fake_pb_utils import TritonError
from tests.triton.stage import Stage, error_of

NO_TOKEN = 99_999
VOCAB_SIZE = make_limits().vocab_size
WITHOUT_BAD_VALUES = {"random_seed"}
"""Every 64-bit number is a seed, and its tensor cannot hold any other."""

# Controls with special errors: a value, values given with it, and the expected end of the message.
SPECIAL: dict[str, tuple[Any, dict[str, Any], str]] = {
    "num_return_sequences": (0, {}, "must be in [1, 1024], got 0"),
    "allowed_token_ids": ((NO_TOKEN,), {}, f"must be in [0, {{}}], got {NO_TOKEN} at position 0"),
    "logit_bias_ids": (
        (NO_TOKEN,),
        {"logit_bias_values": (1.0,)},
        f"must be in [0, {{}}], got {NO_TOKEN} at position 0",
    ),
    "logit_bias_values": (
        (math.nan,),
        {"logit_bias_ids": (5,)},
        "must be finite numbers, or -inf to ban a token, got nan at position 0",
    ),
}
NAMES = [name for name in CONTROLS if name not in WITHOUT_BAD_VALUES]


def bad_values(name: str) -> tuple[dict[str, Any], str]:
    """Return fields of a SamplingConfig with `name` out of range, and the expected text after its name."""
    control = CONTROLS[name]
    if name in SPECIAL:
        value, beside, said = SPECIAL[name]
        return {name: value, **beside}, said.format(VOCAB_SIZE - 1)
    made: type = float if control.dtype == "FP32" else int
    # A top_p of 0 or less counts as not given.
    values = (made(-5), made(2), made(2e10))
    value = next(each for each in values if not (control.range.contains(each) or control.is_off(each)))
    return {name: value}, f"must be {control.range.text}, got {value}"


def tensors_of(values: dict[str, Any], name_of: Callable[[Control], str]) -> dict[str, np.ndarray]:
    types = {"FP32": np.float32, "INT32": np.int32}
    return {
        name_of(CONTROLS[name]): np.atleast_1d(np.array(value, types[CONTROLS[name].dtype]))[np.newaxis]
        for name, value in values.items()
    }


def refused(
    vocabulary: Vocabulary, tensors: dict[str, np.ndarray], parameters: str = "{}"
) -> tuple[int, str]:
    """Return the code and message of a Triton model's answer to a plain prompt with these tensors."""
    plain = token_inputs() if vocabulary is Vocabulary.TOKENS else text_inputs()
    stage = Stage(vocabulary)
    try:
        request = make_triton_request(plain | tensors)
        request.parameters = lambda: parameters
        return error_of(stage.take(request).sent[0])
    finally:
        stage.front_end.close()


def text_name(control: Control) -> str:
    return (*control.text_names, control.tensor)[0]


@pytest.mark.parametrize("name", NAMES)
def test_triton_names_the_tensor_of_the_model(name: str) -> None:
    values, said = bad_values(name)
    for vocabulary, name_of in ((Vocabulary.TOKENS, lambda each: each.tensor), (Vocabulary.TEXT, text_name)):
        tensors, shown = tensors_of(values, name_of), name_of(CONTROLS[name])
        assert refused(vocabulary, tensors) == (TritonError.INVALID_ARG, f"{shown} {said}")
        coded = refused(vocabulary, tensors, '{"error_codes": true}')
        assert coded == (TritonError.INVALID_ARG, f"INVALID_ARG: {shown} {said}")
        structured = refused(vocabulary, tensors, '{"structured_errors": true}')
        assert structured == (TritonError.INVALID_ARG, f"INVALID_ARG: {{{shown}}} {said}")


def test_triton_names_the_alias_that_was_sent() -> None:
    sent = tensors_of({"min_length": -5}, lambda control: control.aliases[0])
    assert refused(Vocabulary.TOKENS, sent)[1] == "min_tokens must be >= 0, got -5"


def bad_field(name: str) -> tuple[Any, str]:
    """Return an invalid value of the control's field in a body, and the message."""
    field = CONTROLS[name].body
    assert field is not None
    no_token = f"must be in [0, {LIMITS.vocab_size - 1}], got {NO_TOKEN} at position 0"
    not_finite = "must be finite numbers, or -inf to ban a token, got inf at position 0"
    special: dict[str, tuple[Any, str]] = {
        "n": (0, "n: expected 1 or more, got 0"),
        "allowed_token_ids": ([NO_TOKEN], f"allowed_token_ids {no_token}"),
        "early_stopping": (-5, 'early_stopping: expected true or false or "never", got -5'),
    }
    if field.name == "logit_bias":
        of_ids = {str(NO_TOKEN): 1.0}, f"logit_bias {no_token}"
        return of_ids if name == "logit_bias_ids" else ({"5": math.inf}, f"logit_bias {not_finite}")
    if not field.is_number:
        return special[field.name]
    if not field.bounds:  # the engine's range
        return 2e10, f"{field.name} must be {CONTROLS[name].range.text}, got 20000000000.0"
    kind, low = next(iter(field.bounds.items()))
    expected = {"ge": f"{low} or more", "gt": f"a number above {low}"}[kind]
    return -5, f"{field.name}: expected {expected}, got -5"


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize("name", [name for name in NAMES if CONTROLS[name].body])
def test_v1_names_the_field_of_the_body(kind: type[SamplingBody], name: str) -> None:
    field = CONTROLS[name].body
    assert field is not None
    value, message = bad_field(name)
    assert said_of_a_body(kind, {field.name: value}) == f"{field.name} invalid_value: {message}"


@pytest.mark.parametrize("name", [name for name in NAMES if CONTROLS[name].body])
def test_v1_names_its_field_for_an_engine_in_another_process(name: str) -> None:
    """The error arrives as `kind` and `marked` from an engine, and in one text from a tritonserver."""
    field = CONTROLS[name].body
    assert field is not None
    values, said = bad_values(name)
    error = refusal_of_the_core(values)
    client = object.__new__(KServeEngineClient)
    of_triton = client._error(InferenceServerException(f"{error.kind}: {error.marked}"))
    for came in (error, error_from_kind(error.kind, error.marked), of_triton):
        status, body = describe_error(came)
        assert (status, body["error"]["param"]) == (400, field.name)
        assert (body["error"]["message"], body["error"]["code"]) == (f"{field.name} {said}", "invalid_value")


def refusal_of_the_core(values: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        Request(0, (1, 2), 4, sampling=SamplingConfig(**values)).validate(make_limits())
    return caught.value


@pytest.mark.parametrize(
    "name", [name for name, each in CONTROLS.items() if each.executor and each.executor.range.text]
)
def test_the_executor_names_the_field_of_its_sampling_config(name: str) -> None:
    field = CONTROLS[name].executor
    assert field is not None
    with pytest.raises(RuntimeError) as caught:
        trtllm.SamplingConfig(**{field.name: -5})
    assert isinstance(caught.value, InflightError) and caught.value.code == "INVALID_ARG"
    assert str(caught.value) == f"SamplingConfig.{field.name} must be {field.range.text}, got -5"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 99_999),
        ("num_return_sequences", 99_999),
        ("temperature", 2e10),
        ("repetition_penalty", 2e10),
        ("presence_penalty", 2e10),
        ("frequency_penalty", 2e10),
        ("beam_search_diversity_rate", 2e10),
    ],
)
def test_the_executor_names_the_field_that_the_engine_refuses(name: str, value: float) -> None:
    config = trtllm.SamplingConfig(**{name: value})
    with pytest.raises(InvalidArgument) as caught:
        to_core_request(trtllm.Request([1, 2], 4, sampling_config=config), LIMITS)
    expected = CONTROLS[name].range.text or "in [1, 1024]"
    assert str(caught.value) == f"{name} must be {expected}, got {value}"


@pytest.mark.parametrize("name", [name for name in CONTROLS if CONTROLS[name].executor])
def test_an_error_of_the_engine_gets_the_executors_name_of_the_field(name: str) -> None:
    control = CONTROLS[name]
    assert control.executor is not None
    error = in_fields(InvalidArgument(Name(control.tensor), " is wrong"))
    assert (str(error), type(error)) == (f"{control.executor.name} is wrong", InvalidArgument)


@pytest.mark.parametrize("name", [name for name in NAMES if CONTROLS[name].client])
def test_the_client_names_its_option(name: str) -> None:
    control = CONTROLS[name]
    assert control.client is not None
    values, said = bad_values(name)
    value = values[name]
    options = read_options({control.client: list(value) if isinstance(value, tuple) else value})
    for vocabulary, tensors in ((Vocabulary.TOKENS, options.ids), (Vocabulary.TEXT, options.text)):
        _, message = refused(vocabulary, tensors, '{"structured_errors": true}')
        error = server_error(InferenceServerException(message), "localhost:8001")
        assert (error.status, str(error)) == ("INVALID_ARGUMENT", f"{control.client} {said}")


def test_the_client_names_the_option_of_a_bias() -> None:
    """`logit_bias` is sent as two tensors."""
    options = read_options({"logit_bias": {NO_TOKEN: 1.0}})
    _, message = refused(Vocabulary.TOKENS, options.ids, '{"structured_errors": true}')
    error = server_error(InferenceServerException(message), "localhost:8001")
    assert str(error) == f"logit_bias must be in [0, {VOCAB_SIZE - 1}], got {NO_TOKEN} at position 0"


def test_a_seed_out_of_range_is_refused_by_the_client() -> None:
    with pytest.raises(ValueError, match=r"^seed must be in \[0, 18446744073709551615\], got -1$"):
        read_options({"seed": -1})


def test_the_tests_here_try_every_control() -> None:
    assert {field.name for field in dataclasses.fields(SamplingConfig)} == {*NAMES, *WITHOUT_BAD_VALUES}
