"""The traces of a request to /v1: an access line, an id on every line, and metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import httpx
import pytest

from inflight.core.report.reports import Reports
from inflight.core.request.response import Response
from inflight.errors import StepFailed, Unsupported
from inflight.log_lines import REQUEST_ID
from inflight.openai import chat_completions, completions, models, server_routes, tokenize
from inflight.openai.batches import routes as batches
from inflight.openai.http_metrics import HttpMetrics
from inflight.openai.playground.routes import playground_router
from tests.access_lines import AccessLines, access_lines
from tests.openai_endpoint.scripted import ScriptedEngine
from tests.openai_endpoint.serving import fake_engine, served
from tests.prometheus import parse

SECRET_TEXT, KEY = "confidential", "sk-do-not-log-me"
BODY = {"model": "demo", "prompt": SECRET_TEXT, "max_tokens": 3}


@pytest.fixture
def lines() -> Iterator[AccessLines]:
    with access_lines() as found:
        yield found


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with fake_engine() as engine, served(engine) as url, httpx.Client(base_url=url) as found:
        yield found


def post(url: str, path: str, body: object, request_id: str, **headers: str) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, headers={"X-Request-Id": request_id, **headers})
    assert answer.headers["X-Request-Id"] == request_id
    return answer


def test_answers_and_refusals_have_one_line_each(
    lines: AccessLines, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with fake_engine() as engine, served(engine, api_keys=(KEY,)) as url:
        known = {"Authorization": f"Bearer {KEY}"}
        assert post(url, "/v1/completions", BODY, "a", **known).status_code == 200
        answered = lines.one()
        bad = {**BODY, "temperature": SECRET_TEXT}
        assert post(url, "/v1/completions", bad, "b", **known).status_code == 400
        assert post(url, "/v1/completions", BODY, "c", Authorization=f"Bearer {KEY}x").status_code == 401
        assert post(url, f"/{SECRET_TEXT}", BODY, "d", **known).status_code == 404
        assert httpx.get(f"{url}/v1/models", headers=known).status_code == 200
        refused = lines.wait(4)[1:]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", answered["client"])
    assert answered | {"request_id": "a", "front": "openai", "model": "demo", "output_tokens": 3} == answered
    assert answered["finish_reason"] == "LENGTH" and answered["prompt_tokens"] > 0
    told = [(line["request_id"], line["status"], line["path"], line["finish_reason"]) for line in refused]
    completions = "/v1/completions"
    assert told == [
        ("b", 400, completions, "ERROR"),
        ("c", 401, completions, "ERROR"),
        ("d", 404, "none", "ERROR"),
    ]
    own = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    everything = f"{lines.fields}{own}{capfd.readouterr()}"
    assert SECRET_TEXT not in everything and KEY not in everything


def test_every_route_returns_the_clients_id(client: httpx.Client) -> None:
    modules = (models, completions, chat_completions, tokenize, server_routes)
    routers = (playground_router, batches.refusing_router, *(module.router for module in modules))
    routes = [getattr(route, "path", "/") for router in routers for route in router.routes]
    paths = {re.sub(r"{.*?}", "x", path) for path in routes} | {"/nothing", "/v1/"}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics", "/", "/v1/files"} <= paths
    statuses: set[int] = set()
    for path in sorted(paths):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            answer = client.request(method, path, headers={"X-Request-Id": f"{method} {path}"})
            assert answer.headers.get_list("X-Request-Id") == [f"{method} {path}"], answer
            statuses.add(answer.status_code)
    assert {200, 400, 404, 405, 501} <= statuses


@pytest.mark.parametrize("body", [{**BODY, "stream": True}, {**BODY, "stream": True, "max_tokens": 10**6}])
def test_a_stream_and_its_refusal_return_the_clients_id(
    client: httpx.Client, body: dict[str, object]
) -> None:
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "a"}) as answer:
        assert answer.headers["X-Request-Id"] == "a"


def test_several_prompts_of_a_stream_share_an_id(lines: AccessLines) -> None:
    with fake_engine() as engine, served(engine) as url:
        body = {**BODY, "prompt": [[1, 2], [3, 4, 5]], "stream": True}
        assert post(url, "/v1/completions", body, "a").text.endswith("data: [DONE]\n\n")
        found = lines.wait(2)
    assert sorted((line["request_id"], line["prompt_tokens"]) for line in found) == [("a", 2), ("a", 3)]


def test_a_client_that_goes_is_in_the_log(lines: AccessLines) -> None:
    with fake_engine() as engine, served(engine) as url:
        body = {**BODY, "prompt": [1, 2, 3], "max_tokens": 200, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": "a"}
        ) as answer:
            next(answer.iter_lines())
        line = lines.one()
    assert line["request_id"] == "a" and line["finish_reason"] in ("CANCELLED", "LENGTH")


class Failing(ScriptedEngine):
    """An engine whose description cannot be read, which is a bug."""

    def describe(self):  # type: ignore[no-untyped-def]
        logging.getLogger("inflight.test").warning("about to fail")
        raise ZeroDivisionError("a bug")


def test_lines_about_a_request_have_its_id(lines: AccessLines) -> None:
    seen: list[tuple[str, str]] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage(), REQUEST_ID.get()))

    loggers, handler = [logging.getLogger(name) for name in ("inflight.test", "uvicorn.error")], Seen()
    with served(Failing()) as url:
        for logger in loggers:
            logger.addHandler(handler)
        assert post(url, "/v1/completions", BODY, "a").status_code == 500
    for logger in loggers:
        logger.removeHandler(handler)
    assert ("about to fail", "a") in seen
    assert any("Exception in ASGI application" in text and request_id == "a" for text, request_id in seen)
    assert lines.one()["status"] == 500


def test_requests_and_durations_are_counted_by_route() -> None:
    metrics = HttpMetrics()
    metrics.observe("/v1/completions", "POST", 200, 0.2)
    metrics.observe("/v1/completions", "POST", 200, 300.0)
    metrics.observe("/v1/completions", "POST", 429, 0.001)
    metrics.observe("none", "GET", 404, 0.001)
    page = metrics.page().splitlines()
    labels = 'handler="/v1/completions",method="POST"'
    assert f'http_requests_total{{{labels},status="2xx",code="200"}} 2' in page
    assert f'http_requests_total{{{labels},status="4xx",code="429"}} 1' in page
    assert f'http_request_duration_seconds_bucket{{{labels},le="0.01"}} 1' in page
    assert f'http_request_duration_seconds_bucket{{{labels},le="0.25"}} 2' in page
    assert f'http_request_duration_seconds_bucket{{{labels},le="+Inf"}} 3' in page
    assert f"http_request_duration_seconds_count{{{labels}}} 3" in page
    assert "http_request_duration_highr_seconds_count 4" in page
    families = [line.split()[2] for line in page if line.startswith("# TYPE")]
    assert families == [
        "http_requests_total",
        "http_request_duration_seconds",
        "http_request_duration_highr_seconds",
    ]


def test_the_metrics_page_has_the_requests_of_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.openai.server_routes._fetch", lambda url: ("nv_x 1", "text/plain"))
    with fake_engine() as engine, served(engine, metrics_url="http://x/metrics") as url:
        post(url, "/v1/completions", BODY, "a")
        httpx.get(f"{url}/v1/models/demo")
        httpx.get(f"{url}/any/{SECRET_TEXT}")
        httpx.get(f"{url}/health")
        page = httpx.get(f"{url}/metrics").text
    counts = dict(re.findall(r'^http_requests_total\{handler="(.*?)".*\} (\d+)$', page, re.MULTILINE))
    assert counts["/v1/completions"] == "1" and page.startswith("nv_x 1\n")
    assert counts["none"] == "1" and SECRET_TEXT not in page
    assert not {"/health", "/metrics"} & counts.keys()
    assert any("{" in handler for handler in counts), counts


def test_without_a_tritonserver_the_page_has_the_engines_metrics() -> None:
    with fake_engine() as engine, served(engine) as url:
        post(url, "/v1/completions", BODY, "a")
        answer = httpx.get(f"{url}/metrics")
    page = parse(answer.text)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert page.value("inflight_generated_tokens_total", model="tensorrt_llm", version="1") == 3
    assert page.value("vllm:generation_tokens_total", model_name="demo") == 3
    assert page.value("http_requests_total", handler="/v1/completions", code="200") == 1


@pytest.mark.parametrize(
    ("reports", "status"),
    [(lambda *asked: Reports(), 503), (Mock(side_effect=Unsupported("no reports")), 404)],
    ids=["an engine that hangs", "one without reports"],
)
def test_without_the_engines_metrics_there_is_no_page(reports: Callable[..., Reports], status: int) -> None:
    engine = ScriptedEngine()
    engine.reports = reports  # type: ignore[method-assign]
    with served(engine) as url:
        assert httpx.get(f"{url}/metrics").status_code == status


def test_an_engines_failure_is_told_by_the_engine_alone(lines: AccessLines) -> None:
    class Broken(ScriptedEngine):
        def submit(self, request, on_response):  # type: ignore[no-untyped-def]
            handle = super().submit(request, lambda response: None)
            on_response(Response(handle.request_id, error=StepFailed("it broke"), is_final=True))
            return handle

    with served(Broken()) as url:
        assert post(url, "/v1/completions", BODY, "a").status_code == 500
    assert not lines.fields  # `LocalEngineClient`, which is not used here, writes it
