"""API keys, cross-origin requests and the bound on bodies, around an application that repeats what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from inflight.openai.middleware import BodyLimit, add_middleware
from inflight.openai.options import OpenAiOptions

KEYS = ("sk-first", "sk-second")
ORIGIN = "https://chat.example"


def client_of(options: OpenAiOptions) -> TestClient:
    app = FastAPI(docs_url=None)

    @app.post("/v1/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    for path in ("/", "/health", "/metrics", "/playground/state", "/v1/models"):
        app.get(path)(lambda: {})
    add_middleware(app, options)
    return TestClient(app)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_keys_everybody_may_ask() -> None:
    assert client_of(OpenAiOptions()).get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/playground/state"])
def test_each_key_opens_everything(key: str, path: str) -> None:
    client = client_of(OpenAiOptions(api_keys=KEYS))
    assert client.get(path, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("sk-firs"), bearer("sk-first2"), bearer(""), {"Authorization": "Basic sk-first"}]
    + [{"Authorization": b"Bearer \xff"}, {"api-key": "sk-first"}],
)
def test_any_other_key_is_refused_in_openais_form(headers: dict) -> None:
    answer = client_of(OpenAiOptions(api_keys=KEYS)).get("/v1/models", headers=headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key" and "Authorization: Bearer" in error["message"]


@pytest.mark.parametrize("path", ["/", "/health"])
def test_the_page_and_health_need_no_key(path: str) -> None:
    assert client_of(OpenAiOptions(api_keys=KEYS)).get(path).status_code == 200


def test_a_body_of_just_the_bound_is_taken_and_one_more_byte_is_not() -> None:
    client = client_of(OpenAiOptions(max_body_bytes=1000))
    assert client.post("/v1/echo", content=b"x" * 1000).json() == {"length": 1000}
    refused = client.post("/v1/echo", content=b"x" * 1001)
    assert refused.status_code == 413 and "larger than 1000 bytes" in refused.json()["error"]["message"]


def parts(count: int) -> Iterator[bytes]:
    """A body without a declared length."""
    for _ in range(count):
        yield b"x" * 100


def test_a_body_in_chunks_is_bounded_too() -> None:
    client = client_of(OpenAiOptions(max_body_bytes=1000))
    assert client.post("/v1/echo", content=parts(10)).json() == {"length": 1000}
    assert client.post("/v1/echo", content=parts(11)).status_code == 413


def preflight(client: TestClient, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return client.options("/v1/echo", headers=headers)


def test_a_browser_is_told_who_may_ask_without_a_key() -> None:
    client = client_of(OpenAiOptions(api_keys=KEYS, cors_origins=(ORIGIN,)))
    allowed = preflight(client, ORIGIN)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in preflight(client, "https://evil.example").headers


def test_a_browser_can_read_a_refusal() -> None:
    client = client_of(OpenAiOptions(api_keys=KEYS, cors_origins=(ORIGIN,)))
    refused = client.get("/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN


def test_without_origins_no_page_may_ask() -> None:
    answer = client_of(OpenAiOptions()).get("/v1/models", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


async def _nobody(scope: object, receive: object, send: object) -> None:
    raise AssertionError("the application is not to be called")


def test_no_more_of_a_body_is_read_than_the_bound() -> None:
    read, said = [], []

    async def endless() -> dict:
        read.append(100)
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: dict) -> None:
        said.append(message)

    scope = {"type": "http", "path": "/v1/echo", "headers": [(b"transfer-encoding", b"chunked")]}
    asyncio.run(BodyLimit(_nobody, 1000)(scope, endless, send))
    assert sum(read) == 1100 and said[0]["status"] == 413
