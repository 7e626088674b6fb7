"""Read a request's parameters, which Triton passes beside its tensors: the timeout, and substitutes for tensors.

tritonserver passes on `timeout` (microseconds) and every other parameter except its own `priority`. With
gRPC and HTTP infer, values are integers, booleans, numbers and strings. HTTP generate turns every key of the
body that is not an input of the model into a parameter, including `timeout`, and the value may be any JSON
value.

Owns the meaning and the valid values of parameters, and the list of parameters that clients send and that
can be ignored. Any other parameter is refused: with HTTP generate it is a misspelt or unknown input. Any
thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from inflight.errors import InflightError, InvalidArgument, Unsupported
from inflight.near_words import nearest
from inflight.same_meaning import same_meaning
from inflight.tensors.input_table import INPUTS
from inflight.tensors.spec import TensorTable, Vocabulary

PRIORITY, CLIENT_ID, ALLOTTED_TIME, TIMEOUT = "request_priority", "client_id", "allotted_time_ms", "timeout"
END_IDS, CODED_ERRORS, STRUCTURED_ERRORS = "end_ids", "error_codes", "structured_errors"
TRACEPARENT = "traceparent"
_READ = frozenset(
    {PRIORITY, CLIENT_ID, ALLOTTED_TIME, TIMEOUT, END_IDS, CODED_ERRORS, STRUCTURED_ERRORS, TRACEPARENT}
)

HARMLESS: Mapping[str, str] = {
    "Streaming": "tensorrtllm_backend's client sends it beside `stop`, and tensorrtllm_backend ignores it too",
    "model": "GenAI-Perf and AIPerf put the model's name into the body of HTTP generate",
    "id": "the protocol of HTTP generate has it in the body, and tritonserver 2.51 passes it on",
    "priority": "Triton's own, for its queue, in case a server passes it on",
    "sequence_id": "Triton's own, for models with a sequence batcher",
    "sequence_start": "the same",
    "sequence_end": "the same",
    "binary_data_output": "of Triton's HTTP front end: how outputs are encoded",
}
"""Parameters that clients are known to send and that are ignored here, each with the reason to ignore it."""

TRITON_PREFIX = "triton_"
"""Prefix of Triton's own parameters, such as triton_enable_empty_final_response."""

_REQUEST_TYPE = "triton_trtllm_request_type"
_WHOLE = "context_and_generation"

_LARGEST_CLIENT_ID = (1 << 64) - 1
_LARGEST_TIME = (1 << 63) - 1
_EXACT = 1 << 53
"""Up to this magnitude, a float64 represents every integer exactly."""


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Values for all prompts of a request; tensors of a prompt override them. None: not given.

    Attributes:
        priority: Parameter `request_priority`, in [0, 1].
        client_id: Parameter `client_id`.
        allotted_time_ms: Parameter `allotted_time_ms`, else `timeout` rounded up to milliseconds.
        end_ids: Parameter `end_ids`: tokens that end the sequence; the tensor `end_id` has only one.
        traceparent: Parameter `traceparent`, W3C's trace context, whose span is the parent of the request's; "":
            not given.
    """

    priority: float | None = None
    client_id: int | None = None
    allotted_time_ms: int | None = None
    end_ids: tuple[int, ...] | None = None
    traceparent: str = ""


NO_PARAMETERS = RequestParameters()


def read_request_parameters(
    parameters: str, timeout_us: int, vocabulary: Vocabulary, ignored: Collection[str] = ()
) -> RequestParameters:
    """Read a request's parameters, a JSON object, and Triton's own timeout.

    Args:
        parameters: The JSON object that Triton passes on, as text.
        timeout_us: Triton's own timeout in microseconds; 0: none.
        vocabulary: The vocabulary of the client's tensor names.
        ignored: The model's parameter `ignored_request_parameters`.

    Raises:
        InvalidArgument: A value is not valid, or a parameter is unknown, for instance a tensor of the other
            vocabulary; the message names the parameter, the value and what was expected.
        Unsupported: A parameter requests only the context or only the generation phase.
    """
    given: dict[str, Any] = json.loads(parameters) if parameters and parameters != "{}" else {}
    if not given and not timeout_us:  # nearly every request
        return NO_PARAMETERS
    _refuse_one_phase(given)
    _check_booleans(given)
    _refuse_misnamed(given, vocabulary, ignored)
    refuse_unread(given, INPUTS, vocabulary, (*_READ, *ignored))
    return RequestParameters(
        priority=_fraction(given, PRIORITY),
        client_id=_integer(given, CLIENT_ID, _LARGEST_CLIENT_ID),
        allotted_time_ms=_allotted_time(given, timeout_us),
        end_ids=_end_ids(given),
        traceparent=_traceparent(given),
    )


def _traceparent(given: Mapping[str, Any]) -> str:
    value = given.get(TRACEPARENT, "")
    if not isinstance(value, str):
        raise InvalidArgument(f"request parameter {TRACEPARENT} is {value!r}, expected text")
    return value


def error_writer(parameters: str) -> Callable[[InflightError], str]:
    """Return the function that formats error messages for a request's client, chosen by the request's parameters.

    With `error_codes` true a message begins with the error's code, because Triton does not pass codes to
    streaming clients: "INVALID_ARG: end_id must be …". With `structured_errors` true a message begins with
    the error's kind, and marks the names of inputs: "INVALID_ARG: {end_id} must be …"
    (`InflightError.marked`). Invalid values have no effect here; `read_request_parameters` refuses them.
    """
    if CODED_ERRORS not in parameters and STRUCTURED_ERRORS not in parameters:  # nearly every request
        return str
    given: Any = json.loads(parameters)
    options = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    if options.get(STRUCTURED_ERRORS) is True:
        return lambda error: f"{error.kind}: {error.marked}"
    if options.get(CODED_ERRORS) is True:
        return lambda error: f"{error.code}: {error}"
    return str


def refuse_unread(
    given: Mapping[str, Any], table: TensorTable, vocabulary: Vocabulary, read: Collection[str]
) -> None:
    """Raise InvalidArgument for the first parameter that is neither in `read` nor known to be harmless.

    Args:
        given: The request's parameters: values by name.
        table: The model's inputs.
        vocabulary: The vocabulary of the inputs' names.
        read: Names of parameters that the model reads, or that the operator configured to be ignored.
    """
    inputs = [name for name, _ in table.declared(vocabulary)]
    for key, value in given.items():
        if key in read or key in HARMLESS or key.startswith(TRITON_PREFIX):
            continue
        if key in inputs:
            raise InvalidArgument(f"{key} came as a request parameter: it is an input, send it as a tensor")
        known = [*inputs, *read]
        near = same_meaning(key, known) or nearest(key, known)
        hint = f"did you mean {near}?" if near else "leave it out"
        shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}…"
        raise InvalidArgument(
            f"this model has no input and no request parameter {key}, got {shown}: it would be ignored; {hint}"
        )


def _refuse_one_phase(given: Mapping[str, Any]) -> None:
    kind = given.get(_REQUEST_TYPE)
    if kind not in (None, "", _WHOLE):
        raise Unsupported(
            f"request parameter {_REQUEST_TYPE} is not available in this version: got {kind!r}; leave it out or "
            f"send {_WHOLE!r}"
        )


def _check_booleans(given: Mapping[str, Any]) -> None:
    for name in (CODED_ERRORS, STRUCTURED_ERRORS):
        value = given.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"request parameter {name} must be true or false, got {value!r}")


def _refuse_misnamed(given: Mapping[str, Any], vocabulary: Vocabulary, ignored: Collection[str]) -> None:
    """Raise InvalidArgument for a parameter that is a tensor's name in the other vocabulary.

    HTTP generate passes on such names as parameters, which would have no effect.
    """
    own = {name for name, _ in INPUTS.declared(vocabulary)}
    (other,) = set(Vocabulary) - {vocabulary}
    for key in given:
        spec = INPUTS.sent_as(key, other)
        if spec is not None and key not in own and key not in ignored:
            names = spec.names(vocabulary)
            called = f"here it is called {names[0]}" if names else "this model does not take it"
            raise InvalidArgument(f"{key} is not an input of this model: {called}")


def _end_ids(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = given.get(END_IDS)
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            raise ValueError
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise InvalidArgument(
            f"request parameter {END_IDS} must be a string of token ids, separated by commas, got {value!r}"
        ) from None


def _allotted_time(given: Mapping[str, Any], timeout_us: int) -> int | None:
    allotted_ms = _integer(given, ALLOTTED_TIME, _LARGEST_TIME)
    if timeout_us > _LARGEST_TIME:  # a negative timeout arrives modulo 2**64
        timeout_us = _in_range(TIMEOUT, timeout_us - (1 << 64), _LARGEST_TIME)
    timeout_us = timeout_us or _integer(given, TIMEOUT, _LARGEST_TIME) or 0
    if allotted_ms is not None:
        return allotted_ms
    return -(-timeout_us // 1000) or None


def _fraction(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not 0.0 <= number <= 1.0:
        raise InvalidArgument(f"request parameter {name} must be a number in [0, 1], got {value!r}")
    return float(np.float32(number))  # rounded like a tensor's value, so that equal priorities compare equal


def _integer(given: Mapping[str, Any], name: str, largest: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not -_EXACT <= value <= _EXACT):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
    except (TypeError, ValueError):
        advice = "; a string can hold one beyond 2**53" if isinstance(value, float) else ""
        raise InvalidArgument(
            f"request parameter {name} must be an integer in [0, {largest}], got {value!r}{advice}"
        ) from None
    return _in_range(name, number, largest)


def _in_range(name: str, number: int, largest: int) -> int:
    if not 0 <= number <= largest:
        raise InvalidArgument(f"request parameter {name} must be an integer in [0, {largest}], got {number}")
    return number
