"""Requests that end an unchecked tritonserver 2.51: each gets an error, and no other request is affected.

`tests/server/test_request_checks.py` tests the bounds; these tests use the front ends of a real server.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight.server.launch import TritonServer
from inflight.testing.fake_server import make_fake_repository
from tests.commands import command

from .clients import completion
from .conftest import DEMO_MODEL

PROMPT = [3, 1, 4, 1, 5]
HUGE = 2**62
TIMEOUT_S = 60.0
INFER = "/v2/models/tensorrt_llm_infer/infer"
GENERATE = "/v2/models/ensemble/generate"
SETTINGS = {"fake_engine": "vocab=3072,step_us=0", "tokenizer_dir": str(DEMO_MODEL)}


@pytest.fixture
def server(fuzzed_server: TritonServer) -> TritonServer:
    return fuzzed_server


@pytest.fixture(autouse=True)
def others_are_served(server: TritonServer) -> Iterator[None]:
    """Check afterwards that the same process serves other requests."""
    request = {"input_ids": PROMPT, "request_output_len": 3}
    pid, before = server.pid, completion(server.grpc, **request).ids
    yield
    assert completion(server.grpc, **request).ids == before
    assert (server.pid, server.returncode) == (pid, None)


def post(server: TritonServer, path: str, body: Any, **headers: str) -> tuple[int, str]:
    """Return the status and the error's text."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, content, {key.replace("_", "-"): headers[key] for key in headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("error", "")
    finally:
        connection.close()


def tensor(name: str, shape: list[int], data: list[Any], kind: str = "INT32") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": kind, "data": data}


def call(
    server: TritonServer, model: str, shapes: dict[str, list[int]], data: list[bytes], classes: str = ""
) -> str:
    """Return the error text of a gRPC request, unary or on a stream."""
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=data)
    for name, shape in shapes.items():
        request.inputs.add(name=name, datatype="INT32", shape=shape)
    if classes:
        request.outputs.add(name=classes).parameters["classification"].int64_param = 1
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if model == "tensorrt_llm":
            return next(iter(stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S))).error_message
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
        return caught.value.details()


@pytest.mark.parametrize(
    "body",
    [
        {"frequency_penalty": []},
        {"text_input": [], "max_tokens": []},
        {"text_input": "def f", "max_tokens": 2, "top_k": []},
    ],
)
@pytest.mark.parametrize("path", [GENERATE, f"{GENERATE}_stream"])
def test_an_empty_batch_is_refused(server, path, body):
    status, says = post(server, path, body)
    assert status == 400 and "got the shape [0,1], expected at least one element" in says


@pytest.mark.parametrize(
    ("shape", "data", "says"),
    [
        ([0, 1], [], "[0,1], expected at least one element in the first dimension"),
        ([0, 0], [], "[0,0], expected at least one element in the first dimension"),
        ([0, HUGE], [], "at most 256 MiB"),
        ([HUGE], [1], "at most 256 MiB"),
        ([2**31, 1_000_000], [1], "at most 256 MiB"),
        ([2**32, 2**32], [1], "at most 256 MiB"),
        ([1, 2**30], [1], "at most 256 MiB"),
    ],
)
def test_invalid_shapes_are_refused_over_http(server, shape, data, says):
    status, error = post(server, INFER, {"inputs": [tensor("input_ids", shape, data)]})
    assert status == 400 and error.startswith("input_ids: got the shape") and says in error


@pytest.mark.parametrize("model", ["tensorrt_llm_infer", "tensorrt_llm"])
@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([0, 1], "[0,1], expected at least one element in the first dimension"),
        ([1, HUGE], "[1,4611686018427387904], expected a tensor of less than 2 GiB"),
        ([0, HUGE], "expected a tensor of less than 2 GiB"),
        ([2**32, 2**32], "expected a tensor of less than 2 GiB"),
        ([-1, 1], "expected no negative dimension"),
    ],
)
def test_invalid_shapes_are_refused_over_grpc(server, model, shape, says):
    error = call(server, model, {"input_ids": shape}, [b""])
    assert "input_ids: got the shape" in error and says in error


@pytest.mark.parametrize("model", ["tensorrt_llm_infer", "tensorrt_llm"])
def test_classification_of_texts_is_refused_over_grpc(server, model):
    shapes, data = {"input_ids": [1, 1], "request_output_len": [1, 1]}, [bytes([1, 0, 0, 0])] * 2
    assert "class result not available" in call(server, model, shapes, data, classes="text_output")


def test_classification_of_texts_is_refused_over_http(server):
    body = {
        "inputs": [tensor("input_ids", [1, 2], [1, 2]), tensor("request_output_len", [1, 1], [2])],
        "outputs": [{"name": "text_output", "parameters": {"classification": 1}}],
    }
    status, says = post(server, INFER, body)
    assert status == 400 and "class result not available for output" in says
    body["outputs"] = [{"name": "output_ids", "parameters": {"classification": 1}}]
    assert post(server, INFER, body)[0] == 200


@pytest.mark.parametrize("unpacked", [b" " * (100 << 20), b"[" * 3_000_000], ids=["blanks", "nested"])
def test_a_body_that_decompresses_to_too_much_is_refused(server, unpacked):
    status, says = post(server, INFER, gzip.compress(unpacked, 1), Content_Encoding="gzip")
    assert status == 500 and "decompression" in says


def test_a_compressed_body_is_read(server):
    body = {"inputs": [tensor("input_ids", [1, 2], [1, 2]), tensor("request_output_len", [1, 1], [2])]}
    assert post(server, INFER, gzip.compress(json.dumps(body).encode()), Content_Encoding="gzip")[0] == 200


@pytest.mark.parametrize("body", [b"[" * 3_000_000, b'{"a":' * 3_000_000], ids=["arrays", "objects"])
def test_deeply_nested_json_closes_its_connection(server, body):
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        post(server, GENERATE, body)


@pytest.mark.exhaustive
def test_the_last_requests_are_logged_when_the_server_is_lost(elsewhere, tmp_path):
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    with command(make_fake_repository(tmp_path / "models"), *settings) as serving:
        ready = serving.ready_line()
        completion(ready["grpc"], input_ids=PROMPT, request_output_len=3)
        os.kill(serving.server(), signal.SIGKILL)
        assert serving.ready_line() == ready
        serving.process.terminate()
        said = serving.process.communicate(timeout=TIMEOUT_S)[1]
    (line,) = [line for line in said.splitlines() if "one of the last requests before the end" in line]
    assert "tensorrt_llm" in line and "input_ids[1,5]" in line and "request_output_len[1,1]" in line


ODD_ANSWERS = {
    "no JSON": (GENERATE, b"{bad", 400, "failed to parse the request JSON buffer"),
    "no JSON for infer": (INFER, b"{bad", 400, "failed to parse the request JSON buffer"),
    "a number for the first text": (
        GENERATE,
        {"text_input": 5, "max_tokens": 3},
        400,
        "; the faulty value is that of the first input in the body",
    ),
    "an unknown input": (
        INFER,
        {"inputs": [{"name": "input_id", "shape": [1, 1], "datatype": "INT32", "data": [1]}]},
        400,
        "'input_id' for model 'tensorrt_llm_infer'; the model's metadata has the names of its inputs",
    ),
    "a text for a number": (
        GENERATE,
        {"text_input": "a", "max_tokens": "three"},
        400,
        "; the faulty value comes after text_input in the body",
    ),
    "a text for a number of infer": (
        INFER,
        {"inputs": [tensor("input_ids", [1, 1], [1]), tensor("request_output_len", [1, 1], ["three"])]},
        400,
        "; request_output_len: expected integers",
    ),
    "too few numbers for a shape": (
        INFER,
        {"inputs": [tensor("input_ids", [1, 3], [1])]},
        400,
        "'data' field; input_ids: expected as many values as its shape has",
    ),
    "no inputs": (
        "/v2/models/postprocessing/infer",
        {"inputs": []},
        400,
        "request has 0 inputs; expected the inputs of the model",
    ),
    "a number for a text": (GENERATE, {"text_input": 5, "max_tokens": 3}, 400, "Unable to parse JSON"),
    "a number as id": (GENERATE, {"id": 5, "text_input": "a"}, 400, "Unable to parse 'id'"),
    "a list as body": (GENERATE, [1], 400, "the body must be a JSON object"),
    "no shape": (
        INFER,
        {"inputs": [{"name": "input_ids", "datatype": "INT32", "data": [1]}]},
        400,
        "Unable to parse 'shape'",
    ),
    "nested ids": (
        "/v2/models/tensorrt_llm/generate",
        {"input_ids": [PROMPT], "request_output_len": 3},
        400,
        "generate takes a list of numbers as [1, 2, 3], without the batch dimension",
    ),
    "one-dimensional ids": (
        INFER,
        {
            "inputs": [
                {"name": "input_ids", "shape": [5], "datatype": "INT32", "data": PROMPT},
                {"name": "request_output_len", "shape": [1, 1], "datatype": "INT32", "data": [3]},
            ]
        },
        400,
        "[1, n] for the n ids of one prompt",
    ),
    "infer of a decoupled model": (
        "/v2/models/tensorrt_llm/infer",
        {"inputs": [{"name": "input_ids", "shape": [1, 5], "datatype": "INT32", "data": PROMPT}]},
        501,
        "tensorrt_llm_infer takes the tensors of tensorrt_llm",
    ),
}


@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_tritons_own_errors_have_the_right_status_and_a_hint(server: TritonServer, case: str) -> None:
    path, body, status, hint = ODD_ANSWERS[case]
    answered, says = post(server, path, body)
    assert answered == status and hint in says, says
    assert says.count(hint) == 1


def test_a_unary_call_of_a_decoupled_model_names_the_other(server: TritonServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="tensorrt_llm"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "tensorrt_llm_infer takes the tensors of tensorrt_llm" in caught.value.details()


def test_one_dimensional_ids_over_grpc_are_answered_with_the_shapes(server: TritonServer) -> None:
    tensors = {"input_ids": (PROMPT, [len(PROMPT)]), "request_output_len": ([3], [1, 1])}
    request = service_pb2.ModelInferRequest(model_name="tensorrt_llm_infer")
    for name, (values, shape) in tensors.items():
        tensor = request.inputs.add(name=name, datatype="INT32", shape=shape)
        tensor.contents.int_contents.extend(values)
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "[1, n] for the n ids of one prompt" in caught.value.details()
