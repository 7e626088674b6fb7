from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from inflight_client import AsyncClient, Completion, Delta, Sequence, ServerError
from tests.client.fake_server import (
    PATIENCE_S,
    Asked,
    FakeServer,
    Refusal,
    Response,
    answer_with,
    as_texts,
    response,
    response_of,
)
from tests.client.test_client import delta, until_stopped


def test_generate_and_stream(server: FakeServer) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.generate("x", top_k=5) == Completion((Sequence("abc", (), "LENGTH"),))
            server.answer = lambda asked: answer_with(asked, [[5, 6], [7]])
            deltas = [one async for one in client.stream([1, 2])]
            assert deltas == [delta(ids=(5, 6)), delta(ids=(7,), reason="LENGTH")]

    asyncio.run(ask())
    text, ids = server.asked
    assert (text.model, text.inputs["top_k"], text.inputs["stream"]) == ("ensemble", [5], [False])
    assert (ids.model, ids.inputs["input_ids"], ids.inputs["streaming"]) == ("tensorrt_llm", [1, 2], [True])


def test_state(server: FakeServer) -> None:
    """The final flag may come alone."""
    server.answer = lambda asked: [
        response_of(asked, state=as_texts('{"queued_requests": 3}')),
        response(asked, final=True),
    ]

    async def ask() -> dict:
        async with AsyncClient(server.url) as client:
            return await client.state()

    assert asyncio.run(ask()) == {"queued_requests": 3}
    assert (server.asked[0].model, server.asked[0].outputs) == ("tensorrt_llm", ["state"])


def test_many_at_a_time(server: FakeServer) -> None:
    server.answer = lambda asked: answer_with(asked, [asked.inputs["text_input"][0], "!"])

    async def ask() -> list[Completion]:
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.generate(str(number)) for number in range(8)))

    assert [answer.text for answer in asyncio.run(ask())] == [f"{number}!" for number in range(8)]


def test_errors(server: FakeServer) -> None:
    def refuse(asked: Asked) -> Iterator[Response]:
        yield response(asked, "a", "NOT_FINISHED")
        raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "in flight")

    server.answer = refuse

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.generate("x")

    with pytest.raises(ServerError, match="in flight") as caught:
        asyncio.run(ask(server.url))
    assert caught.value.status == "ALREADY_EXISTS"
    with pytest.raises(ServerError, match="no server answers at localhost:9") as caught:
        asyncio.run(ask("localhost:9"))
    assert caught.value.status == "UNAVAILABLE"


def test_a_stream_without_an_end_is_an_error(server: FakeServer) -> None:
    server.answer = lambda asked: [response(asked, "a", "NOT_FINISHED")]

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            await client.generate("x")

    with pytest.raises(ServerError, match="closed the stream before its last response"):
        asyncio.run(ask())


@pytest.mark.parametrize("how", ["aclose", "task"])
def test_leaving_a_stream_cancels_the_request(server: FakeServer, how: str) -> None:
    server.answer = lambda asked: until_stopped(server, asked)

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            deltas = client.stream("x")
            await anext(deltas)
            if how == "aclose":
                await deltas.aclose()
            else:
                task = asyncio.ensure_future(anext(deltas))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await asyncio.to_thread(server.cancelled.wait, PATIENCE_S)

    asyncio.run(ask())


def test_cancel_ends_a_request_by_its_id(server: FakeServer) -> None:
    server.answer = lambda asked: until_stopped(server, asked)

    async def ask() -> list[Delta]:
        async with AsyncClient(server.url) as client:
            deltas = client.stream([5], request_id="mine")
            await anext(deltas)
            await client.cancel("mine")
            return [delta async for delta in deltas]

    assert [delta.finish_reason for delta in asyncio.run(ask())] == ["CANCELLED"]
    assert (server.asked[-1].model, server.asked[-1].request_id) == ("tensorrt_llm", "mine")


def test_streamed_beams_are_cumulative(server: FakeServer) -> None:
    server.answer = lambda asked: answer_with(asked, ["a", "ab"])

    async def ask() -> list[Delta]:
        async with AsyncClient(server.url) as client:
            return [one async for one in client.stream("x", beam_width=2)]

    assert [(one.text, one.is_cumulative) for one in asyncio.run(ask())] == [("a", True), ("ab", True)]
    assert server.asked[0].inputs["beam_width"] == [2]
