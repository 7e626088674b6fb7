"""What a Triton request says beside its tensors: its timeout, and parameters that stand in for tensors.

tritonserver keeps its own `priority` to itself, hands `timeout` (microseconds) on, and passes every other
parameter through: integers, booleans, numbers and strings over gRPC and HTTP infer, whatever JSON has over HTTP
generate, which makes a parameter of every key that is no input of the model (of `timeout` too).

Owns which parameters mean something and what may stand in them; all others are ignored, except tensors under the
name of another model. Runs on the thread that calls execute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.errors import InvalidArgument
from inflight.triton.tensor_spec import Vocabulary
from inflight.triton.tensors import INPUTS

PRIORITY, CLIENT_ID, ALLOTTED_TIME, TIMEOUT = "request_priority", "client_id", "allotted_time_ms", "timeout"
_LARGEST_CLIENT_ID = (1 << 64) - 1
_LARGEST_TIME = (1 << 63) - 1
_EXACT = 1 << 53
"""Beyond it a number that came as a float may be another's neighbour."""


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """For every prompt of the request, where it has no tensor that says otherwise. None: not given.

    Attributes:
        priority: Parameter `request_priority`, in [0, 1].
        client_id: Parameter `client_id`.
        allotted_time_ms: Parameter `allotted_time_ms`, else `timeout`, rounded up.
    """

    priority: float | None = None
    client_id: int | None = None
    allotted_time_ms: int | None = None


NO_PARAMETERS = RequestParameters()


def read_request_parameters(parameters: str, timeout_us: int, vocabulary: Vocabulary) -> RequestParameters:
    """What `parameters` (a JSON object) and Triton's own timeout say.

    Raises InvalidArgument for a bad value, and for a tensor of the other vocabulary; the message names the
    parameter, what came and what was expected.
    """
    given = json.loads(parameters) if parameters and parameters != "{}" else {}
    if not given and not timeout_us:  # nearly every request
        return NO_PARAMETERS
    _refuse_misnamed(given, vocabulary)
    return RequestParameters(
        priority=_fraction(given, PRIORITY),
        client_id=_integer(given, CLIENT_ID, _LARGEST_CLIENT_ID),
        allotted_time_ms=_allotted_time(given, timeout_us),
    )


def _refuse_misnamed(given: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """HTTP generate makes a parameter of a tensor that goes by another name here, and nobody would read it."""
    own = {name for name, _ in INPUTS.declared(vocabulary)}
    (other,) = set(Vocabulary) - {vocabulary}
    for key in given:
        spec = INPUTS.sent_as(key, other)
        if spec is not None and key not in own:
            names = spec.names(vocabulary)
            called = f"here it is called {names[0]}" if names else "this model does not take it"
            raise InvalidArgument(f"{key} is not an input of this model: {called}")


def _allotted_time(given: Mapping[str, Any], timeout_us: int) -> int | None:
    allotted_ms = _integer(given, ALLOTTED_TIME, _LARGEST_TIME)
    if timeout_us > _LARGEST_TIME:  # a negative one arrives as what it is modulo 2**64
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
    return float(np.float32(number))  # as a tensor would bring it: equal priorities are equal


def _integer(given: Mapping[str, Any], name: str, largest: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not -_EXACT <= value <= _EXACT):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
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
