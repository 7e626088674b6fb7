"""API keys, cross-origin requests and HEAD, with an application that returns what it receives."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from inflight.openai.middleware import add_middleware
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


def test_without_keys_all_requests_are_allowed() -> None:
    assert client_of(OpenAiOptions()).get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/playground/state"])
def test_each_key_allows_every_request(key: str, path: str) -> None:
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


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_head_is_answered_like_get(path: str) -> None:
    client = client_of(OpenAiOptions())
    assert client.head(path).status_code == client.get(path).status_code == 200
    assert client.head("/v1/echo").status_code == client.get("/v1/echo").status_code == 405


def preflight(client: TestClient, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return client.options("/v1/echo", headers=headers)


def test_a_preflight_needs_no_key() -> None:
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


def test_without_origins_no_cross_origin_request_is_allowed() -> None:
    answer = client_of(OpenAiOptions()).get("/v1/models", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers
