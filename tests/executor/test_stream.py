"""`Executor.stream`: responses as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

import inflight.executor as trtllm
from inflight.core.request.adapter import LoraRequest
from inflight.errors import Unavailable
from tests.executor.conftest import PROMPT, make_executor

LONG = 30_000  # long enough to be still in flight on a busy machine


async def collect(executor: trtllm.Executor, request: trtllm.Request) -> list[int]:
    tokens: list[int] = []
    async for response in executor.stream(request):
        tokens += response.result.output_token_ids[0]
    return tokens


def test_streams_run_side_by_side(executor, reference) -> None:
    prompts = [[token] * 4 for token in range(5, 15)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(collect(executor, trtllm.Request(each, 9)) for each in prompts))

    assert asyncio.run(main()) == [reference(each, 9) for each in prompts]


def test_an_adapter_may_be_named(executor, monkeypatch) -> None:
    client, submitted = executor._engine.client, []

    def submit(request, on_response):
        submitted.append(request.lora)
        return type(client).submit(client, replace(request, lora=None), on_response)

    monkeypatch.setattr(client, "submit", submit)

    async def main() -> None:
        async for _ in executor.stream(trtllm.Request(PROMPT, 3), lora="sql"):
            pass
        both = executor.stream(trtllm.Request(PROMPT, 3, lora_config=trtllm.LoraConfig(1)), lora="sql")
        with pytest.raises(RuntimeError, match="lora is 'sql' and the request has a lora_config"):
            await anext(both)

    asyncio.run(main())
    assert submitted == [LoraRequest(name="sql")]


def test_a_streams_responses_are_not_returned_by_await_responses(executor) -> None:
    async def main() -> None:
        async for response in executor.stream(trtllm.Request(PROMPT, 3, client_id=4)):
            assert response.client_id == 4
            assert executor.get_num_responses_ready() == 0

    asyncio.run(main())
    assert executor.await_responses(timedelta(0)) == []


def test_leaving_early_cancels_the_request(executor) -> None:
    executor.get_latest_iteration_stats()

    async def main() -> None:
        stream = executor.stream(trtllm.Request(PROMPT, LONG))
        async for response in stream:
            assert not response.result.is_final
            break
        await stream.aclose()

    asyncio.run(main())
    assert asyncio.run(collect(executor, trtllm.Request(PROMPT, 2))) is not None
    stats = executor.get_latest_iteration_stats()
    assert len(stats) < LONG and stats[-1].num_active_requests <= 1


def test_a_request_that_cannot_be_served_is_an_error(executor) -> None:
    async def main() -> list[trtllm.Response]:
        return [each async for each in executor.stream(trtllm.Request([5] * 40_000, 1))]

    (response,) = asyncio.run(main())
    assert "40000" in response.error_msg


def test_a_request_that_the_engine_refuses_raises_and_frees_its_place_in_the_queue(
    checkpoint, monkeypatch
) -> None:
    def refuse(*_) -> None:
        raise Unavailable("the engine is gone")

    with make_executor(checkpoint, max_batch_size=1, max_beam_width=1, max_queue_size=1) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(executor._engine.client, "submit", refuse)
            for _ in range(3):
                with pytest.raises(trtllm.ExecutorError, match="the engine is gone"):
                    asyncio.run(collect(executor, trtllm.Request(PROMPT, 2)))
                with pytest.raises(trtllm.ExecutorError, match="the engine is gone"):
                    executor.enqueue_requests([trtllm.Request(PROMPT, 2)] * 2)
        assert asyncio.run(collect(executor, trtllm.Request(PROMPT, 2)))


def test_the_request_is_not_modified(executor) -> None:
    request = trtllm.Request(PROMPT, 2)
    asyncio.run(collect(executor, request))
    assert not request.streaming


def test_stream_raises_after_shutdown(checkpoint) -> None:
    executor = trtllm.Executor(
        checkpoint,
        executor_config=trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=2048)),
    )
    executor.shutdown()
    with pytest.raises(RuntimeError, match="Shutdown called"):
        asyncio.run(collect(executor, trtllm.Request(PROMPT, 2)))
