"""Requests that stop another, ask for the state or manage adapters are distinguished from generation requests."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import InvalidArgument
from inflight.tensors.request_kind import RequestKind, request_kind
from inflight.tensors.spec import Vocabulary
from tests.tensors.factories import make_rows

ASKING = {
    RequestKind.STOP: ("stop", [True], [False]),
    RequestKind.STATE: ("state", [True], [False]),
    RequestKind.ADAPTERS: ("lora_command", [b"x"], [b""]),
}


@pytest.mark.parametrize("vocabulary", Vocabulary)
@pytest.mark.parametrize("kind", ASKING)
def test_only_a_tensor_set_to_true_or_a_command_makes_a_special_request(
    kind: RequestKind, vocabulary: Vocabulary
) -> None:
    name, asks, does_not = ASKING[kind]
    dtype = np.object_ if kind is RequestKind.ADAPTERS else np.bool_
    assert request_kind(make_rows({name: np.array(asks, dtype)}, vocabulary)) is kind
    assert request_kind(make_rows({name: np.array(does_not, dtype)}, vocabulary)) is RequestKind.GENERATE
    assert request_kind(make_rows({}, vocabulary)) is RequestKind.GENERATE


@pytest.mark.parametrize("kind", ASKING)
def test_one_special_row_decides_the_kind_of_its_batch(kind: RequestKind) -> None:
    name, asks, does_not = ASKING[kind]
    dtype = np.object_ if kind is RequestKind.ADAPTERS else np.bool_
    assert request_kind(make_rows({name: np.array(does_not + asks, dtype)})) is kind
    assert request_kind(make_rows({name: np.array(does_not * 2, dtype)})) is RequestKind.GENERATE


def test_stop_takes_precedence_over_state_and_state_over_a_command() -> None:
    true, command = np.array([True]), np.array([b"x"], np.object_)
    every = {"lora_command": command, "state": true, "stop": true}
    assert request_kind(make_rows(every)) is RequestKind.STOP
    assert request_kind(make_rows(every | {"stop": np.array([False])})) is RequestKind.STATE
    assert request_kind(make_rows({"stop": true, "state": np.array([1.5])})) is RequestKind.STOP


@pytest.mark.parametrize("name", ["stop", "state"])
def test_another_type_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{name} must be BOOL, got float64$"):
        request_kind(make_rows({name: np.array([1.5])}))
