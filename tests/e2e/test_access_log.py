"""The log of a server as its operator sees it: few lines at a start, one for each request, JSON if wanted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight.log_lines import parse_fields
from tests.commands import Command, command

from .clients import Stream, wait_until
from .conftest import REPOSITORY

MOST_LINES_OF_A_START = 15
PROMPT = "confidential text"


def access_lines(server, request_id: str) -> list[dict]:
    found = [parse_fields(line) for line in re.findall(r"access\] (.*)", server.log_text())]
    return [line for line in found if line["request_id"] == request_id]


def wait_for_line(server, request_id: str) -> dict:
    wait_until(lambda: access_lines(server, request_id))
    (line,) = access_lines(server, request_id)
    return line


def test_every_front_end_logs_one_line_for_a_request(demo_server):
    body = {"text_input": PROMPT, "max_tokens": 4}
    url = f"http://{demo_server.http}/v2/models/ensemble/generate"
    assert httpx.post(url, json={"id": "by-http", **body}).json()["id"] == "by-http"
    with Stream(demo_server.grpc) as stream:
        stream.send("tensorrt_llm", "by-grpc", input_ids=[1, 2, 3], request_output_len=4)
        list(stream.until_final())
    completion = {"model": Path(demo_server.repository.checkpoint).name, "prompt": PROMPT, "max_tokens": 4}
    headers = {"X-Request-Id": "by v1"}
    assert httpx.post(f"{demo_server.openai}/v1/completions", json=completion, headers=headers).is_success
    fronts = {name: wait_for_line(demo_server, name) for name in ("by-http", "by-grpc", "by v1")}
    assert {name: line["front"] for name, line in fronts.items()} == {
        "by-http": "triton",
        "by-grpc": "triton",
        "by v1": "openai",
    }
    assert fronts["by-http"]["model"] == "ensemble" and fronts["by-grpc"]["prompt_tokens"] == 3
    assert fronts["by v1"]["client"].startswith("127.0.0.1:")
    for line in fronts.values():
        assert 0 < line["output_tokens"] <= 4 and line["finish_reason"] in ("LENGTH", "END_ID")
        assert 0 < line["first_token_ms"] <= line["total_ms"]
    assert "confidential" not in demo_server.log_text()
    page = httpx.get(f"{demo_server.openai}/metrics").text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx",code="200"}' in page


WRONG_TYPE = {"name": "input_ids", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("absent/generate", {"text_input": PROMPT}, "NOT_FOUND"),
        ("ensemble/versions/7/generate_stream", {"text_input": PROMPT}, "NOT_FOUND"),
        ("ensemble/generate", {"text_input": PROMPT, "max_tokens": "three"}, "INVALID_ARG"),
        ("ensemble/generate", [PROMPT], "INVALID_ARG"),
        ("ensemble/infer", {"inputs": []}, "UNSUPPORTED"),
        ("absent/infer", {"inputs": []}, "NOT_FOUND"),
        ("tensorrt_llm_infer/infer", {"inputs": [WRONG_TYPE]}, "INVALID_ARG"),
    ],
)
def test_a_request_that_triton_refuses_over_http_has_a_line(demo_server, path, body, code):
    def refused() -> list[dict]:
        found = [parse_fields(line) for line in re.findall(r"access\] (.*)", demo_server.log_text())]
        return [line for line in found if line["request_id"].startswith("refused-")]

    before = len(refused())
    assert (
        httpx.get(f"http://{demo_server.http}/v2/models/absent").status_code == 404
    )  # GET requests have none
    assert httpx.post(f"http://{demo_server.http}/v2/models/{path}", json=body).is_error
    wait_until(lambda: len(refused()) > before)
    (line,) = refused()[before:]
    assert (line["front"], line["model"], line["code"]) == ("triton", path.split("/")[0], code)
    assert (line["finish_reason"], line["output_tokens"]) == ("ERROR", 0) and "first_token_ms" not in line
    assert "confidential" not in demo_server.log_text()


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [("4711", "4711"), ('a "b"=\\c\nI1128', "a??b???c?I1128"), ("refused", "refused")],
)
@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer"])
def test_a_request_that_triton_refuses_over_grpc_has_a_line_with_its_id(
    demo_server, request_id, shown, model
):
    before = len(access_lines(demo_server, shown))
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[bytes(8)])
    request.inputs.add(name="input_ids", datatype="FP32", shape=[1, 2])
    with grpc.insecure_channel(demo_server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if model == "tensorrt_llm":
            assert "FP32" in next(iter(stub.ModelStreamInfer(iter([request])))).error_message
        else:
            with pytest.raises(grpc.RpcError, match="FP32"):
                stub.ModelInfer(request)
    wait_until(lambda: len(access_lines(demo_server, shown)) > before)
    (line,) = access_lines(demo_server, shown)[before:]
    assert (line["model"], line["code"]) == (model, "INVALID_ARG")


@pytest.fixture(scope="module")
def json_server(elsewhere):
    with command(REPOSITORY, "--log-format", "json", "--openai-port", "0") as running:
        yield running


def test_a_start_logs_few_lines_and_all_lines_are_json(json_server: Command):
    addresses = json_server.ready_line()
    httpx.post(
        f"{addresses['openai']}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 2},
        headers={"X-Request-Id": "mine"},
    )
    json_server.process.terminate()
    _, errors = json_server.process.communicate(timeout=120)
    lines = [json.loads(line) for line in errors.splitlines()]
    request = next(number for number, line in enumerate(lines) if line.get("request_id") == "mine")
    assert request <= MOST_LINES_OF_A_START, errors
    assert {"time", "level", "source", "pid", "output_tokens", "total_ms"} <= lines[request].keys()
    assert all({"time", "level"} <= line.keys() for line in lines)
    assert PROMPT not in errors
