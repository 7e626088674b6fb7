"""LoRA tensors of requests, before any adapter is looked up: types, shapes, combinations, commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer
from inflight.testing.fake_server import serve_fake

from .clients import ask, make_inputs, unary
from .conftest import DEMO_MODEL

PROMPT = [3, 1, 4]
REQUEST = {"input_ids": PROMPT, "request_output_len": 4}
TEXT_REQUEST = {"text_input": "def f", "max_tokens": 4}
WEIGHTS = np.zeros((1, 2, 6), np.float16)
ROWS = np.array([[[1, 0, 1, 0], [3, 0, 1, 0]]], np.int32)


@pytest.mark.covers("lora_task_id", "lora_weights", "lora_config", "lora_name")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_task_id": 1, "lora_weights": WEIGHTS}, "must have both lora_weights and lora_keys"),
        ({"lora_weights": WEIGHTS, "lora_config": ROWS}, "lora_task_id must be set for LoRA inference"),
        ({"lora_task_id": 1, "lora_weights": WEIGHTS, "lora_config": ROWS[:, :1]}, "Expected dim1 "),
        ({"lora_task_id": 1, "lora_weights": WEIGHTS, "lora_config": ROWS[:, :, :2]}, "Expected dim2 "),
        ({"lora_task_id": 1, "lora_name": "sql"}, "they name different adapters"),
    ],
)  # fmt: skip
def test_conflicting_tensors_are_refused(fake_server, model, tensors, message):
    request = REQUEST if model == "tensorrt_llm" else TEXT_REQUEST
    (refused,) = ask(fake_server.grpc, model, **request, **tensors)
    assert message in str(refused.error)
    # All inputs of the test's marks are sent, in one or another of its cases.
    ask(
        fake_server.grpc,
        model,
        **request,
        lora_task_id=1,
        lora_weights=WEIGHTS,
        lora_config=ROWS,
        lora_name="x",
    )


@pytest.mark.covers("lora_path", "lora_ckpt_source")
def test_an_adapter_folder_must_be_a_peft_folder(fake_server):
    asked = {**TEXT_REQUEST, "lora_path": "sql", "lora_ckpt_source": "nemo"}
    (refused,) = ask(fake_server.grpc, "ensemble", **asked)
    assert "lora_ckpt_source is 'nemo', expected 'hf'" in str(refused.error)


def test_triton_accepts_weights_in_the_declared_type_only(fake_server):
    with pytest.raises(InferenceServerException, match=r"lora_weights.*FP32.*expects 'FP16'"):
        unary(
            fake_server.grpc,
            **REQUEST,
            lora_task_id=1,
            lora_weights=WEIGHTS.astype(np.float32),
            lora_config=ROWS,
        )


@pytest.fixture(scope="module")
def bfloat16_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A server that takes bfloat16 weights and adapter commands, and has no adapters."""
    settings = {
        "fake_engine": "vocab=1000,step_us=0",
        "tokenizer_dir": str(DEMO_MODEL),
        "lora_weights_data_type": "TYPE_BF16",
        "enable_adapter_commands": "true",
    }
    with serve_fake(settings=settings) as server:
        yield server


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer", "ensemble"])
def test_every_model_declares_weights_in_the_parameters_type(bfloat16_server, model):
    client = grpc.InferenceServerClient(bfloat16_server.grpc)
    config = client.get_model_config(model, as_json=True)["config"]
    client.close()
    (found,) = [each for each in config["input"] if each["name"] == "lora_weights"]
    assert (found["data_type"], found["dims"]) == ("TYPE_BF16", ["-1", "-1"])


def test_bfloat16_weights_are_read(bfloat16_server):
    """numpy has no such type; the error about their shape shows that they were read."""
    weights = grpc.InferInput("lora_weights", WEIGHTS.shape, "BF16")
    weights.set_data_from_numpy(WEIGHTS.astype(np.float32))
    others = make_inputs(grpc, **REQUEST, lora_task_id=1, lora_config=ROWS[:, :1])
    client = grpc.InferenceServerClient(bfloat16_server.grpc)
    said = r"lora_weights has 2 rows in \[1, 2, 6\] and lora_config 1 in \[1, 1, 4\]"
    with pytest.raises(InferenceServerException, match=said):
        client.infer("tensorrt_llm_infer", [*others, weights])
    client.close()


def test_adapter_commands_are_refused_unless_the_server_allows_them(fake_server):
    command = {"lora_command": '{"command": "list"}'}
    for model in ("tensorrt_llm", "ensemble"):
        (refused,) = ask(fake_server.grpc, model, **command)
        assert "parameter enable_adapter_commands" in str(refused.error)
    with pytest.raises(InferenceServerException, match="parameter enable_adapter_commands") as caught:
        unary(fake_server.grpc, **command)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_bad_adapter_command_is_refused_with_the_expected_form(bfloat16_server, model):
    (refused,) = ask(bfloat16_server.grpc, model, lora_command=json.dumps({"command": "drop"}))
    assert 'lora_command has no known command, expected {"command": "list"}' in str(refused.error)
