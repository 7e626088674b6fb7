"""The tensors that choose a request's adapter, and the commands about adapters."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inflight.core.request.adapter import LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.errors import InvalidArgument, Unsupported
from inflight.tensors.inference_request import InferenceRequest
from inflight.tensors.lora import read_adapter_command, read_lora
from inflight.tensors.requests import convert
from inflight.tensors.spec import Vocabulary
from tests.tensors.factories import (
    make_context,
    make_limits,
    make_reader,
    make_rows,
    text_inputs,
    token_inputs,
)

ROWS = np.arange(12, dtype=np.float16).reshape(1, 2, 6)
CONFIG = np.array([[[1, 0, 2, 0], [3, 1, 1, 1]]], np.int32)
STORED = ((1, 0, 2, 0), (3, 1, 1, 1))


def read(vocabulary: Vocabulary = Vocabulary.TOKENS, **tensors: object) -> LoraRequest | None:
    inputs = token_inputs(**tensors) if vocabulary is Vocabulary.TOKENS else text_inputs(**tensors)
    return read_lora(make_reader(inputs, vocabulary))


def weights(array: np.ndarray, dtype: str) -> LoraWeights:
    return LoraWeights(Matrix((2, 6), dtype, RawBuffer(array.tobytes())), STORED)


@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_adapters_are_chosen_by_id_or_by_name(vocabulary: Vocabulary) -> None:
    assert read(vocabulary) is None
    assert read(vocabulary, lora_task_id=0) == LoraRequest(0)
    assert read(vocabulary, lora_task_id=2**64 - 1) == LoraRequest(2**64 - 1)
    assert read(vocabulary, lora_name=b"sql") == LoraRequest(name="sql")
    assert read(vocabulary, lora_name=b"") is None


def test_a_gpt_manager_takes_adapters_with_and_without_the_batch_dimension() -> None:
    tensors = {"lora_task_id": np.array(7, np.uint64), "lora_weights": ROWS, "lora_config": CONFIG}
    for whole in (True, False):
        sent = {name: array if whole or not array.ndim else array[0] for name, array in tensors.items()}
        request = InferenceRequest(1, {**token_inputs(), **sent}).to_request(make_limits())
        assert request.lora == LoraRequest(7, weights=weights(ROWS, "float16"))


@pytest.mark.parametrize(("array", "dtype"), [(ROWS, "float16"), (ROWS.astype(np.float32), "float32")])
def test_weights_in_a_request_are_read(array: np.ndarray, dtype: str) -> None:
    assert read(lora_task_id=7, lora_weights=array, lora_config=CONFIG) == LoraRequest(
        7, weights=weights(array, dtype)
    )


def test_lora_config_may_have_three_columns() -> None:
    found = read(lora_task_id=7, lora_weights=ROWS, lora_config=CONFIG[:, :, :3])
    assert found is not None and found.weights is not None and found.weights.config == ((1, 0, 2), (3, 1, 1))


def test_the_weights_outlive_tritons_memory() -> None:
    array = ROWS.copy()
    found = read(lora_task_id=7, lora_weights=array, lora_config=CONFIG)
    array[:] = -1
    assert found is not None and found.weights == weights(ROWS, "float16")


def test_each_row_of_a_batch_has_its_own_adapter() -> None:
    inputs = token_inputs(
        input_ids=[[5, 6], [7, 8]],
        request_output_len=np.array([4, 4], np.int32),
        lora_task_id=np.array([3, 4], np.uint64),
        lora_weights=np.concatenate([ROWS, ROWS + 1]),
        lora_config=np.concatenate([CONFIG, CONFIG]),
    )
    first, second = convert(make_rows(inputs), make_context())
    assert first.request.lora == LoraRequest(3, weights=weights(ROWS, "float16"))
    assert second.request.lora == LoraRequest(4, weights=weights(ROWS + 1, "float16"))


def test_adapter_tensors_of_llmapi_are_read() -> None:
    assert read(Vocabulary.TEXT, lora_id=7) == LoraRequest(7)
    asked = {"lora_id": 7, "lora_name": b"sql", "lora_path": b"sql-v2", "lora_ckpt_source": b"hf"}
    assert read(Vocabulary.TEXT, **asked) == LoraRequest(path="sql-v2")
    assert read(Vocabulary.TEXT, lora_ckpt_source=b"hf") is None
    with pytest.raises(
        Unsupported, match="lora_ckpt_source is 'nemo', expected 'hf': adapters are PEFT folders"
    ):
        read(Vocabulary.TEXT, lora_path=b"x", lora_ckpt_source=b"nemo")
    with pytest.raises(InvalidArgument, match="lora_name is 'sql' and lora_id is 7: they name different"):
        read(Vocabulary.TEXT, lora_id=7, lora_name=b"sql")


REFUSED = [
    (
        {"lora_weights": ROWS, "lora_config": CONFIG},
        "^lora_task_id must be set for LoRA inference: lora_weights",
    ),
    (
        {"lora_weights": ROWS, "lora_config": CONFIG, "lora_name": b"sql"},
        "^lora_task_id must be set for LoRA inference",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS},
        "^Request for LoRA inference must have both lora_weights and lora_keys: lora_weights came without",
    ),
    (
        {"lora_task_id": 1, "lora_config": CONFIG},
        "^Request for LoRA inference must have both lora_weights and lora_keys: lora_config came without",
    ),
    (
        {"lora_task_id": 1, "lora_name": b"sql"},
        "lora_name is 'sql' and lora_task_id is 1: they name different",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS, "lora_config": CONFIG[:, :1]},
        r"^Expected dim1 lora_weights and lora_keys to have the same size: .* \[1, 2, 6\] .* \[1, 1, 4\]",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS, "lora_config": CONFIG[:, :, :2]},
        r"^Expected dim2 of lora_keys to have a size in \[3, 4\]: .* got lora_config \[1, 2, 2\]",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS, "lora_config": CONFIG.astype(np.int64)},
        "lora_config must be INT32, got int64",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS.astype(np.float64), "lora_config": CONFIG},
        "lora_weights must be FP16 or FP32 or BF16, got float64",
    ),
    (
        {"lora_task_id": 1, "lora_weights": ROWS.ravel(), "lora_config": CONFIG},
        r"lora_weights must have shape \[1, n, n\], got \[12\]",
    ),
    ({"lora_name": b"\xff"}, "lora_name must be UTF-8 text"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED, ids=lambda part: "")
def test_adapter_tensors_that_contradict_each_other_are_refused(
    tensors: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(**tensors)


def command(text: object) -> AdapterCommand:
    given = text if isinstance(text, str) else json.dumps(text)
    return read_adapter_command(make_rows({"lora_command": np.array([given.encode()], np.object_)}))


def test_adapter_commands_are_parsed() -> None:
    assert command({"command": "list"}) == AdapterCommand(AdapterAction.LIST)
    assert command({"command": "load", "name": "a", "path": "b"}) == AdapterCommand(
        AdapterAction.LOAD, "a", path="b"
    )
    assert command({"command": "load", "name": "a"}) == AdapterCommand(AdapterAction.LOAD, "a")
    for replaces in (True, False):
        text = {"command": "load", "name": "a", "replace": replaces}
        assert command(text) == AdapterCommand(AdapterAction.LOAD, "a", replaces=replaces)
    assert command({"command": "unload", "name": "a"}) == AdapterCommand(AdapterAction.UNLOAD, "a")
    assert command({"command": "unload", "task_id": 0}) == AdapterCommand(AdapterAction.UNLOAD, task_id=0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no known command"),
        ({"command": "LIST"}, "has no known command"),
        ({"command": ["list"]}, "has no known command"),
        ({"command": "list", "name": "a"}, "has 'name', which list does not take"),
        ({"command": "load"}, "has no name to load"),
        ({"command": "load", "name": ""}, "has name '', expected a text"),
        ({"command": "load", "name": 3}, "has name 3, expected a text"),
        ({"command": "load", "name": "a", "task_id": 3}, "has 'task_id', which load does not take"),
        ({"command": "load", "name": "a", "replace": 1}, "has replace 1, expected true or false"),
        ({"command": "unload", "name": "a", "replace": True}, "has 'replace', which unload does not take"),
        ({"command": "unload"}, "must have either a name or a task_id"),
        ({"command": "unload", "name": "a", "task_id": 1}, "must have either a name or a task_id"),
        ({"command": "unload", "task_id": "1" * 10_000}, "has task_id '111"),
        ({"command": "list", "n" * 10_000: 1}, "has 'nnn"),
        ({"command": "unload", "task_id": "1"}, "has task_id '1', expected an integer"),
        ({"command": "unload", "task_id": True}, "has task_id True, expected an integer"),
        ({"command": "unload", "task_id": -1}, "has task_id -1, expected an integer"),
        ({"command": "unload", "task_id": 2**64}, "has task_id 18446744073709551616, expected an integer"),
    ],
    ids=lambda part: "",
)
def test_invalid_adapter_commands_are_refused_with_the_problem(text: object, problem: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        command(text)
    message = str(raised.value)
    assert message.startswith(f"lora_command {problem}") and len(message) < 600


def test_a_batch_of_adapter_commands_is_refused() -> None:
    two = np.array([b'{"command": "list"}'] * 2, np.object_)
    with pytest.raises(InvalidArgument, match="lora_command takes one command, got a batch of 2"):
        read_adapter_command(make_rows({"lora_command": two}))
