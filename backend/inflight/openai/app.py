"""The application: routes, error handlers and middleware around one engine client.

`create_app` is the composition root of this package. The caller owns the engine client, and closes it after
the application has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import APIRouter, FastAPI

from inflight.access_log import AccessLog
from inflight.core.ports import EngineClient
from inflight.errors import InflightError
from inflight.openai import (
    adapters,
    chat_completions,
    classify,
    completions,
    derender,
    embeddings,
    generate,
    models,
    render,
    rerank,
    server_routes,
    sleep,
    tokenize,
)
from inflight.openai.batches import routes as batches
from inflight.openai.batches.folder import BatchFolder
from inflight.openai.batches.in_process import call_application
from inflight.openai.batches.jobs import BatchJobs
from inflight.openai.batches.lines import BatchAnswer, BatchRequest
from inflight.openai.bodies import BodyReader
from inflight.openai.context import Context, choose_context
from inflight.openai.errors import ApiError, add_error_handlers
from inflight.openai.http_metrics import HttpMetrics, HttpObserver
from inflight.openai.messages import routes as messages
from inflight.openai.middleware import add_middleware
from inflight.openai.options import OpenAiOptions
from inflight.openai.pictures import ChatPictures, PicturesEncoder
from inflight.openai.playground.routes import playground_router
from inflight.openai.responses.file import ResponseFile
from inflight.openai.responses.routes import router as responses_router
from inflight.openai.responses.store import KeptResponses
from inflight.openai.serving_model import ServingModel
from inflight.serving.engine_session import EngineSession

_ENGINE_CHECK_S = 1.0


def create_app(
    client: EngineClient,
    options: OpenAiOptions,
    picture_encoder: PicturesEncoder | None = None,
    others: Sequence[EngineClient] = (),
) -> FastAPI:
    """Return the application. It must be served by one event loop.

    Args:
        client: Client of the engine; the engine may be unavailable or restarted at any time.
        options: Options of the endpoint.
        picture_encoder: The process that encodes the model's pictures; None: messages with pictures are
            refused.
        others: Clients of further engines, whose models are named by their folders, and have the chat templates
            of their checkpoints.
    """
    contexts, access_log = _contexts(client, options, picture_encoder, others), AccessLog()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        # At the start the engine may still be loading.
        loading = [asyncio.create_task(_until_available(each.session, each.model.load)) for each in contexts]
        if jobs is not None:
            jobs.start()
        yield
        for task in loading:
            task.cancel()
        if jobs is not None:
            await jobs.close()
        for each in contexts:
            each.session.close()
        app.state.responses.close()
        access_log.close()

    app = FastAPI(title="inflight", lifespan=lifespan, docs_url=None, redoc_url=None)
    jobs = _jobs(app, contexts, options)
    app.state.contexts = contexts
    app.state.batches = jobs
    app.state.bodies = BodyReader(contexts[0].session, options.max_body_bytes)
    file = None if options.response_store is None else ResponseFile(options.response_store)
    app.state.responses = KeptResponses(options.max_stored_responses, options.max_stored_bytes, file)
    routers = _routers(has_batches=jobs is not None)
    for router in routers:
        app.include_router(router)
    add_middleware(app, options)
    paths = frozenset(getattr(route, "path", "") for router in routers for route in router.routes)
    add_error_handlers(app, paths)
    app.add_middleware(HttpObserver, paths=paths, metrics=contexts[0].http_metrics, access_log=access_log)
    return app


def _contexts(
    client: EngineClient,
    options: OpenAiOptions,
    picture_encoder: PicturesEncoder | None,
    others: Sequence[EngineClient],
) -> tuple[Context, ...]:
    """Return what the routes need of each engine, `client`'s first. The arguments are those of `create_app`."""
    model = ServingModel(client, options, has_encoder=picture_encoder is not None)
    pictures = None if picture_encoder is None else ChatPictures(picture_encoder, options)
    first = Context(EngineSession(client), model, HttpMetrics(), pictures)
    of_others = replace(options, served_model_names=(), chat_template=None)
    further = (
        Context(EngineSession(other), ServingModel(other, of_others), first.http_metrics) for other in others
    )
    return (first, *further)


def _routers(has_batches: bool) -> tuple[APIRouter, ...]:
    """Return the routers of all routes; those of batches refuse every request unless `has_batches`."""
    of_texts, pooling = (completions, chat_completions, messages), (embeddings, classify, rerank)
    of_ids = (render, generate, derender)
    modules = (models, adapters, sleep, *of_texts, *pooling, *of_ids, tokenize, server_routes)
    batches_router = batches.router if has_batches else batches.refusing_router
    return (*(module.router for module in modules), responses_router, batches_router, playground_router)


async def _until_available(session: EngineSession, ask: Callable[[], object]) -> None:
    """Call a function that asks the engine, until the engine is available and has a description."""
    while True:
        try:
            await session.wait_for(ask)
            return
        except InflightError:
            await asyncio.sleep(_ENGINE_CHECK_S)


async def _context_of(contexts: Sequence[Context], request: BatchRequest) -> Context:
    """Return the context of a batch's request; the first one if its model is not known, which is its answer."""
    name = request.body.get("model")
    try:
        return await contexts[0].session.wait_for(
            lambda: choose_context(contexts, name if isinstance(name, str) else None)
        )
    except ApiError:
        return contexts[0]


def _jobs(app: FastAPI, contexts: Sequence[Context], options: OpenAiOptions) -> BatchJobs | None:
    """Return the batches of the folder that the options name; None if they name none."""
    if options.batch_dir is None:
        return None

    async def send(owner: bytes, request: BatchRequest) -> BatchAnswer:
        # Time without an engine, or with one that sleeps, does not count as an attempt.
        context = await _context_of(contexts, request)
        await _until_available(context.session, context.model.check_awake)
        return await call_application(app, request, owner)

    folder = BatchFolder(options.batch_dir, options.max_batch_bytes)
    return BatchJobs(folder, send, options.batch_concurrency)
