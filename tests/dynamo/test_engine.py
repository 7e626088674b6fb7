"""The worker's engine over a real endpoint, with stand-ins for Dynamo's modules; the test plays the batcher."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.core.report.reports import Reports
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason, StopSignal
from inflight.endpoint.server import EndpointServer
from inflight.errors import InflightError, InvalidArgument, Name, QueueFull, StepFailed, Unavailable
from tests.core.test_stats import STATS
from tests.dynamo.stand_ins import FakeContext, Record, install
from tests.dynamo.test_requests import frontends_request
from tests.endpoint.factories import Batcher
from tests.endpoint.test_socket_reports import METRICS


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    install(monkeypatch)
    yield importlib.import_module("inflight.dynamo.engine")
    sys.modules.pop("inflight.dynamo.engine")


@pytest.fixture
def path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="dynamo-")  # pytest's own folders can be too deep for a socket
    yield str(Path(folder, "engine.sock"))
    shutil.rmtree(folder)


@pytest.fixture
def batcher(path: str) -> Iterator[Batcher]:
    batcher = Batcher()
    batcher.reports = Reports(metrics=(STATS, METRICS.snapshot()))
    server = EndpointServer(batcher.client, path)
    yield batcher
    server.close()


@pytest.fixture
def engine(engine_module: Any, path: str) -> Any:
    given = argparse.Namespace(
        engine_endpoint=path,
        model="/models/tiny",
        served_model_name="tiny",
        kv_events_endpoint="tcp://127.0.0.1:5557",
    )
    return engine_module.DynamoEngine(given)


def run(engine: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine between the engine's start and its cleanup."""

    async def between() -> Any:
        await engine.start(1)
        try:
            return await work
        finally:
            await engine.cleanup()

    return asyncio.run(between())


async def chunks_of(engine: Any, **groups: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(frontends_request(**groups), FakeContext())]


def test_the_worker_registers_with_the_limits_of_the_engine(engine: Any, batcher: Batcher) -> None:
    async def start() -> Any:
        config = await engine.start(1)
        await engine.cleanup()
        await engine.cleanup()
        return config, await engine.kv_event_sources()

    config, sources = asyncio.run(start())
    assert config == Record(
        model="/models/tiny",
        served_model_name="tiny",
        llm=Record(
            context_length=256,
            kv_cache_block_size=16,
            total_kv_blocks=32,
            max_num_seqs=8,
            max_num_batched_tokens=4096,
        ),
    )
    assert sources == [Record(endpoint="tcp://127.0.0.1:5557", dp_rank=0)]


def test_an_engine_that_never_started_can_be_cleaned_up(engine: Any) -> None:
    asyncio.run(engine.cleanup())


def test_chunks_are_streamed_as_the_engine_answers(engine: Any, batcher: Batcher) -> None:
    async def converse() -> list[dict[str, Any]]:
        answering = asyncio.create_task(chunks_of(engine))
        request = await asyncio.to_thread(batcher.take)
        assert request.input_token_ids == (5, 6, 7)
        batcher.answer(request, 8, final=False)
        batcher.answer(request, 9)
        return await answering

    chunks = run(engine, converse())
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == [8, 9]
    assert [chunk.get("finish_reason") for chunk in chunks] == [*[None] * (len(chunks) - 1), "length"]
    assert chunks[-1]["completion_usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidArgument(Name("request_output_len"), " is bad"), "InvalidArgument", "max_tokens is bad"),
        (QueueFull("the queue is full"), "EngineShutdown", "the queue is full"),
        (Unavailable("the server drains"), "EngineShutdown", "the server drains"),
        (StepFailed("out of memory"), "Unknown", "out of memory"),
    ],
)
def test_errors_of_the_engine_are_dynamos_exceptions(
    engine: Any, engine_module: Any, batcher: Batcher, error: InflightError, kind: str, message: str
) -> None:
    async def fail() -> None:
        answering = asyncio.create_task(chunks_of(engine))
        request = await asyncio.to_thread(batcher.take)
        batcher.client.send_response(Response(request.request_id, error=error, is_final=True))
        await answering

    with pytest.raises(getattr(engine_module.exceptions, kind), match=message):
        run(engine, fail())


def test_a_refused_request_names_the_field(engine: Any, engine_module: Any, batcher: Batcher) -> None:
    with pytest.raises(engine_module.exceptions.InvalidArgument, match="max_tokens is 5000"):
        run(engine, chunks_of(engine, stop_conditions={"max_tokens": 5000}))


def test_a_lost_engine_migrates_its_requests(engine: Any, engine_module: Any, batcher: Batcher) -> None:
    async def lose() -> None:
        answering = asyncio.create_task(chunks_of(engine))
        await asyncio.to_thread(batcher.take)
        await asyncio.to_thread(engine._client.close)
        await answering

    with pytest.raises(engine_module.exceptions.EngineShutdown, match="connection to the engine was lost"):
        run(engine, lose())


@pytest.mark.parametrize("by", ["abort", "close"])
def test_a_request_is_stopped_if_its_client_has_gone(engine: Any, batcher: Batcher, by: str) -> None:
    async def leave() -> None:
        answers = engine.generate(frontends_request(), FakeContext())
        first = asyncio.create_task(anext(answers))
        request = await asyncio.to_thread(batcher.take)
        batcher.answer(request, 8, final=False)
        await first
        if by == "abort":
            await engine.abort(FakeContext())
        else:
            await answers.aclose()
        stops = await asyncio.to_thread(batcher.stops, 1)
        assert stops == {StopSignal(request.request_id, StopReason.CANCELLED)}
        if by == "abort":
            batcher.answer(request)
            async for _ in answers:
                pass
        await engine.abort(FakeContext())  # an unknown request is ignored

    run(engine, leave())


def test_the_load_is_published(engine: Any, engine_module: Any, batcher: Batcher, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_module, "_TICK_S", 0.001)

    async def publish() -> tuple[int, Any]:
        told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        engine.attach_snapshot_publisher(Record(publish=lambda *snapshot: told.put_nowait(snapshot)))
        return await told.get()

    assert run(engine, publish()) == (
        0,
        Record(
            kv_used_blocks=100,
            kv_total_blocks=300,
            gpu_cache_usage=0.333333,
            dp_rank=0,
            kv_cache_hit_rate=0.75,
        ),
    )
