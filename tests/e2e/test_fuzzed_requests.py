"""Random requests over HTTP and gRPC, the same in every run: each is answered, and the server survives.

Values, shapes and data are drawn from those that often cause defects. A response may be an error here.
"""

from __future__ import annotations

import gzip
import http.client
import json
import random
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight.server.launch import TritonServer
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import Vocabulary
from inflight.tensors.text_model_tables import POSTPROCESSING_INPUTS, PREPROCESSING_INPUTS
from tests.tiers import with_all

from .clients import completion

TIMEOUT_S = 60.0
PROMPT = [3, 1, 4, 1, 5]
TENSORS = {
    "tensorrt_llm": INPUTS.declared(Vocabulary.TOKENS),
    "tensorrt_llm_infer": INPUTS.declared(Vocabulary.TOKENS),
    "ensemble": INPUTS.declared(Vocabulary.TEXT),
    "tensorrt_llm_bls": INPUTS.declared(Vocabulary.TEXT),
    "preprocessing": PREPROCESSING_INPUTS.declared(Vocabulary.TOKENS),
    "postprocessing": POSTPROCESSING_INPUTS.declared(Vocabulary.TOKENS),
}
WHOLE = {
    "tensorrt_llm": ("input_ids", "request_output_len"),
    "tensorrt_llm_infer": ("input_ids", "request_output_len"),
    "ensemble": ("text_input", "max_tokens"),
    "tensorrt_llm_bls": ("text_input", "max_tokens"),
    "preprocessing": ("QUERY", "REQUEST_OUTPUT_LEN"),
    "postprocessing": ("TOKENS_BATCH",),
}
"""Inputs that make a request to a model complete; half of the requests have them, besides the random ones."""
INTEGERS = (0, 1, 1, 2, 3, -1, 7, 64, 65, 2**31 - 1, -(2**31), 2**31, 2**32, 2**63 - 1, 2**64)
DIMENSIONS = (0, 1, 1, 1, 2, 3, 5, 64, 65, 2**16, 2**31, 2**32, 2**61, 2**62, 2**63 - 1)
VALUES = (
    *INTEGERS,
    0.5,
    1e-40,
    1e39,
    -0.0,
    "",
    "a",
    "def f(x):",
    "\0",
    "é😀",
    "{}",
    "[[",
    True,
    False,
    None,
    {},
)
SIZES = {"BOOL": 1, "UINT8": 1, "INT32": 4, "INT64": 8, "UINT64": 8, "FP16": 2, "FP32": 4, "BYTES": 5}


class Fuzzer:
    """Requests drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def http(self) -> tuple[str, bytes, dict[str, str]]:
        """Draw a path, a body and its headers."""
        chance = self._chance
        model = chance.choice(list(TENSORS))
        kind = chance.choice(["generate", "generate_stream", "infer", "infer"])
        body = json.dumps(self._infer(model) if kind == "infer" else self._generate(model)).encode()
        headers = {}
        if chance.random() < 0.1:
            place = chance.randrange(len(body))
            body = body[:place] + chance.randbytes(3) + body[place + chance.randrange(4) :]
        if chance.random() < 0.1:
            headers["Inference-Header-Content-Length"] = str(chance.choice([0, 1, len(body), *INTEGERS]))
        if chance.random() < 0.1:
            body, headers["Content-Encoding"] = gzip.compress(body)[: chance.choice([None, 20])], "gzip"
        return f"/v2/models/{model}/{kind}", body, headers

    def grpc(self) -> service_pb2.ModelInferRequest:
        """Draw a request for a unary call or a stream."""
        chance = self._chance
        model = chance.choice(list(TENSORS))
        request = service_pb2.ModelInferRequest(model_name=model, id=chance.choice(["", "a", "é" * 300]))
        for name, kind in self._names(model):
            shape = self._shape()
            request.inputs.add(name=name, datatype=kind, shape=shape)
            if chance.random() < 0.9:
                request.raw_input_contents.append(self._data(kind, shape))
        for name, kind, shape in self._whole(model, [each.name for each in request.inputs]):
            request.inputs.add(name=name, datatype=kind, shape=shape)
            request.raw_input_contents.append(b"\1\0\0\0a" if kind == "BYTES" else b"\3\0\0\0")
        for output in self._outputs():
            made = request.outputs.add(name=output["name"])
            for key, value in output["parameters"].items():
                if isinstance(value, int):
                    made.parameters[key].int64_param = max(-(2**63), min(value, 2**63 - 1))
        return request

    def _generate(self, model: str) -> dict[str, Any]:
        body = {name: self._value() for name, _ in self._names(model)}
        for name, kind, _ in self._whole(model, list(body)):
            body[name] = "def f" if kind == "BYTES" else 3
        return body

    def _infer(self, model: str) -> dict[str, Any]:
        inputs = []
        for name, kind in self._names(model):
            made = {"name": name, "datatype": kind, "shape": self._shape()}
            if self._chance.random() < 0.9:
                made["data"] = self._value()
            if self._chance.random() < 0.1:
                made["parameters"] = {"binary_data_size": self._chance.choice(INTEGERS)}
            inputs.append(made)
        for name, kind, shape in self._whole(model, [each["name"] for each in inputs]):
            data = ["def f"] if kind == "BYTES" else [3]
            inputs.append({"name": name, "datatype": kind, "shape": shape, "data": data})
        return {"inputs": inputs, "outputs": self._outputs()}

    def _whole(self, model: str, given: list[str]) -> list[tuple[str, str, list[int]]]:
        """Return names, data types and shapes of the missing required inputs; half of the time none."""
        if self._chance.random() < 0.5:
            return []
        types = {name: spec.dtype for name, spec in TENSORS[model]}
        shapes = {"TOKENS_BATCH": [1, 1, 1]}
        return [(name, types[name], shapes.get(name, [1, 1])) for name in WHOLE[model] if name not in given]

    def _names(self, model: str) -> list[tuple[str, str]]:
        chance = self._chance
        declared = [(name, spec.dtype) for name, spec in TENSORS[model]]
        chosen = chance.sample(declared, min(chance.choice([0, 0, 1, 1, 2, 3]), len(declared)))
        if chance.random() < 0.1:
            return [(name, chance.choice(list(SIZES))) for name, _ in chosen]
        return chosen

    def _outputs(self) -> list[dict[str, Any]]:
        chance = self._chance
        names = [spec.name for spec in OUTPUTS.specs]
        keys = ("classification", "binary_data", "no such parameter")
        return [
            {"name": name, "parameters": {chance.choice(keys): chance.choice([*INTEGERS, True])}}
            for name in chance.sample(names, chance.choice([0, 0, 1, 2]))
        ]

    def _shape(self) -> list[int]:
        return [self._chance.choice(DIMENSIONS) for _ in range(self._chance.choice([0, 1, 2, 2, 2, 3]))]

    def _value(self) -> Any:
        chance = self._chance
        if chance.random() < 0.6:
            return chance.choice(VALUES)
        return [chance.choice((*VALUES, [], [1], [[]])) for _ in range(chance.choice([0, 0, 1, 2, 5]))]

    def _data(self, kind: str, shape: list[int]) -> bytes:
        size = SIZES.get(kind, 4)
        for dim in shape:
            size *= dim
        if kind == "BYTES" and size <= 1 << 16:
            return b"\1\0\0\0a" * (size // 5)
        return bytes(
            size if size <= 1 << 16 and self._chance.random() < 0.8 else self._chance.choice([0, 1, 4, 12])
        )


def ask_http(server: TritonServer, path: str, body: bytes, headers: dict[str, str]) -> str:
    connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return str(response.status)
    finally:
        connection.close()


def ask_grpc(server: TritonServer, request: service_pb2.ModelInferRequest, is_stream: bool) -> str:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if is_stream:
                answers = list(stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S))
                return "error" if not answers or answers[-1].error_message else "OK"
            stub.ModelInfer(request, timeout=TIMEOUT_S)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name


@pytest.mark.parametrize("seeds", with_all([range(300), range(300, 1500)], [range(300)]), ids=str)
def test_every_random_request_is_answered_and_the_server_survives(fuzzed_server, seeds):
    server = fuzzed_server
    request = {"input_ids": PROMPT, "request_output_len": 3}
    before, seen = completion(server.grpc, **request).ids, set()
    for seed in seeds:
        fuzzer = Fuzzer(seed)
        if seed % 2:
            given = fuzzer.http()
            answer = ask_http(server, *given)
        else:
            given = fuzzer.grpc()
            answer = ask_grpc(server, given, is_stream=seed % 4 == 0)
        seen.add(answer)
        assert answer not in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"), (seed, given, answer)
        assert server.returncode is None, (seed, given, answer)
    assert completion(server.grpc, **request).ids == before
    assert {"400", "INVALID_ARGUMENT"} <= seen
