"""all_models/llmapi: tensors without a batch dimension, as TensorRT-LLM's llmapi_client.py sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc

from inflight.server.launch import TritonServer, serve
from inflight.triton.config_pbtxt import LLMAPI

from .clients import generate
from .conftest import DEMO_MODEL

TEXT = "import os\n"


@pytest.fixture(scope="module")
def llmapi_server(elsewhere: Path) -> Iterator[TritonServer]:
    with serve(model_repository=Path(__file__).parents[2] / LLMAPI, model=DEMO_MODEL) as server:
        yield server


def ask(server: TritonServer, outputs: list[str] | None = None, **tensors: np.ndarray) -> grpc.InferResult:
    """Send one unary request with arrays as they are."""
    client = grpc.InferenceServerClient(server.grpc)
    inputs = []
    for name, array in tensors.items():
        dtype = {np.object_: "BYTES", np.int32: "INT32", np.bool_: "BOOL"}[array.dtype.type]
        inputs.append(grpc.InferInput(name, array.shape, dtype))
        inputs[-1].set_data_from_numpy(array)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
    try:
        return client.infer("tensorrt_llm", inputs, outputs=wanted)
    finally:
        client.close()


def test_a_text_and_a_number_may_have_one_dimension(llmapi_server: TritonServer) -> None:
    answer = ask(
        llmapi_server,
        text_input=np.array([TEXT.encode()], np.object_),
        sampling_param_max_tokens=np.array([4], np.int32),
        sampling_param_return_perf_metrics=np.array([True]),
    )
    assert answer.as_numpy("text_output")[0].decode().startswith(TEXT)
    assert answer.as_numpy("finish_reason").shape == answer.as_numpy("arrival_time_ns").shape == (1,)


def test_ids_and_logits_have_the_declared_shapes(llmapi_server: TritonServer) -> None:
    tensors = {"input_ids": np.array([10, 11, 12], np.int32), "max_tokens": np.array([4], np.int32)}
    answer = ask(llmapi_server, ["output_ids", "sequence_length", "context_logits"], **tensors)
    assert answer.as_numpy("output_ids").shape == (1, 7)
    assert answer.as_numpy("sequence_length").tolist() == [7]
    assert answer.as_numpy("context_logits").shape == (0, 0)


def test_http_generate_answers_with_the_prompt_and_its_continuation(llmapi_server: TritonServer) -> None:
    answer = generate(llmapi_server.http, "tensorrt_llm", text_input=TEXT, sampling_param_max_tokens=4)
    assert answer["text_output"].startswith(TEXT)
