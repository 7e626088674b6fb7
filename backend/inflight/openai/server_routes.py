"""Routes about the server: health, version, metrics.

Also registers OpenAI's routes that are not supported; each returns an error with the reason.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.core.ports import EngineClient
from inflight.core.report.reports import ReportKind
from inflight.errors import InflightError, Unavailable, Unsupported
from inflight.openai.context import context_of, contexts_of
from inflight.openai.errors import ApiError
from inflight.openai.metric_aliases import vllm_aliases
from inflight.openai.serving_model import ServingModel
from inflight.serving.metrics_page import CONTENT_TYPE, metrics_page, pictures_page
from inflight.version import package_version

router = APIRouter()
_METRICS_TIMEOUT_S = 5.0
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""URL opener that ignores http_proxy, because tritonserver is on this machine or in the same network."""
_ENGINE_LABELS = {"model": "tensorrt_llm", "version": "1"}
"""The labels of the engine's metrics without Triton: those that they have with it."""
_TEXT_ALONE = "this server generates text alone"
_NO_UPLOADS = "this server keeps files for batches alone: send them to /v1/files"
_NO_MESSAGES = "batches of messages are not served: send the chats with the same meaning to /v1/batches"
_NO_AGENTS = (
    "this server keeps no conversations, assistants or stores: send the messages to /v1/chat/completions"
)
_NO_TRAINING = "this server trains and evaluates nothing"
_NOT_SERVED = {
    "/v1/messages/batches": _NO_MESSAGES,
    "/v1/responses/compact": "this server compacts no conversations: truncation auto drops their first turns",
    "/v1/responses/input_tokens": "the usage of a response has its input_tokens; /tokenize counts messages",
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _TEXT_ALONE),
    "/v1/moderations": "this server moderates nothing",
    "/pooling": "this server returns no hidden states here: /v1/embeddings returns embeddings",
    **dict.fromkeys(("/v1/uploads", "/v1/containers"), _NO_UPLOADS),
    **dict.fromkeys(
        ("/v1/assistants", "/v1/threads", "/v1/conversations", "/v1/vector_stores", "/v1/chatkit"), _NO_AGENTS
    ),
    **dict.fromkeys(("/v1/fine_tuning", "/v1/evals"), _NO_TRAINING),
}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 while an engine can be reached, else 503."""
    contexts = contexts_of(request)

    def find() -> None:
        for context in contexts[:-1]:
            with contextlib.suppress(Unavailable):
                context.model.describe()
                return
        contexts[-1].model.describe()

    await contexts[0].session.wait_for(find)
    return Response()


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return this package's version as vLLM's /version does: `{"version": "0.1.0"}`."""
    return {"version": package_version()}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the engine's metrics, the same under vLLM's names, and those of pictures and HTTP requests."""
    context = context_of(request)
    page, kind = await context.session.wait_for(lambda: _page(context.session.client, context.model))
    if context.pictures is not None and not context.model.options.metrics_url:  # Triton's page has them
        stats = await context.pictures.stats()
        page += "" if stats is None else pictures_page(stats)
    return Response(page + context.http_metrics.page(), media_type=kind)


def _page(client: EngineClient, model: ServingModel) -> tuple[str, str]:
    """Return Triton's metrics page, or without Triton the engine's, and vLLM's names for it."""
    url = model.options.metrics_url
    page, kind = _fetch(url) if url else (_engine_page(client), CONTENT_TYPE)
    try:
        name = model.names[0]
    except InflightError:  # Triton's page exists even without an engine
        name = None
    if not page.endswith("\n"):
        page += "\n"
    return page + vllm_aliases(page, name), kind


def _engine_page(client: EngineClient) -> str:
    try:
        reports = client.reports(ReportKind.METRICS, _METRICS_TIMEOUT_S)
    except Unsupported:
        raise ApiError("this server was started without a metrics page to forward", 404) from None
    if reports.metrics is None:
        raise Unavailable("the engine does not report its metrics: an iteration takes long, or it has ended")
    return metrics_page(*reports.metrics, time.time(), reports.memory, _ENGINE_LABELS)


def _fetch(url: str) -> tuple[str, str]:
    try:
        with _DIRECTLY.open(url, timeout=_METRICS_TIMEOUT_S) as answer:
            kind = answer.headers.get("Content-Type", "text/plain; version=0.0.4")
            return answer.read().decode("utf-8", "replace"), kind
    except (OSError, urllib.error.URLError) as error:
        raise Unavailable(f"the metrics page cannot be read: {error}") from error


def _refuse(path: str, sentence: str, methods: list[str]) -> None:
    @router.api_route(path, methods=methods)
    async def refuse() -> Response:
        raise ApiError(sentence, 501, None, "not_implemented")


for _path, _sentence in _NOT_SERVED.items():
    _refuse(_path, _sentence, _METHODS)
    _refuse(f"{_path}/{{rest:path}}", _sentence, _METHODS)
_STORED = "this server keeps no completions"
_refuse("/v1/chat/completions", _STORED, ["GET"])
_refuse("/v1/chat/completions/{rest:path}", _STORED, ["GET", "POST", "DELETE"])
_refuse("/v1/models/{rest:path}", "this server deletes no models", ["DELETE"])
