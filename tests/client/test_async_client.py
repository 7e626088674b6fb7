from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator

import pytest

from inflight_client import Adapter, AsyncClient, Client, Completion, Delta, Sequence, ServerError
from tests.client.fake_server import (
    PATIENCE_S,
    Asked,
    FakeServer,
    HangUp,
    Refusal,
    Response,
    answer_with,
    as_texts,
    response,
    response_of,
)
from tests.client.test_client import delta, refuse_texts, until_stopped


def test_texts_are_generated_and_ids_are_streamed(server: FakeServer) -> None:
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


def test_state_is_returned_though_the_final_flag_comes_alone(server: FakeServer) -> None:
    """The final flag may be in a response of its own."""
    server.answer = lambda asked: [
        response_of(asked, state=as_texts('{"queued_requests": 3}')),
        response(asked, final=True),
    ]

    async def ask() -> dict:
        async with AsyncClient(server.url) as client:
            return await client.state()

    assert asyncio.run(ask()) == {"queued_requests": 3}
    assert (server.asked[0].model, server.asked[0].outputs) == ("tensorrt_llm", ["state"])


def test_adapters_are_listed_loaded_and_unloaded(server: FakeServer) -> None:
    sql = Adapter("sql", path="/a", is_loaded=False)
    text = json.dumps({"adapters": [dataclasses.asdict(sql)]})
    server.answer = lambda asked: [
        response_of(asked, adapters=as_texts(text)),
        response(asked, final=True),
    ]

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.adapters() == (sql,)
            assert await client.load_adapter("sql", "b") == (sql,)
            assert await client.unload_adapter(7, model="ensemble") == (sql,)

    asyncio.run(ask())
    assert [json.loads(asked.inputs["lora_command"][0]) for asked in server.asked] == [
        {"command": "list"},
        {"command": "load", "name": "sql", "path": "b"},
        {"command": "unload", "task_id": 7},
    ]
    assert [asked.model for asked in server.asked] == ["tensorrt_llm", "tensorrt_llm", "ensemble"]
    client = Client(server.url)
    assert client.adapters() == client.load_adapter("sql") == client.unload_adapter("sql") == (sql,)


def test_concurrent_requests_get_their_own_answers(server: FakeServer) -> None:
    server.answer = lambda asked: answer_with(asked, [asked.inputs["text_input"][0], "!"])

    async def ask() -> list[Completion]:
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.generate(str(number)) for number in range(8)))

    assert [answer.text for answer in asyncio.run(ask())] == [f"{number}!" for number in range(8)]


def test_errors_carry_the_servers_status_or_unavailable(server: FakeServer) -> None:
    def refuse(asked: Asked) -> Iterator[Response]:
        yield response(asked, "a", "NOT_FINISHED")
        raise Refusal("ALREADY_EXISTS", "in flight")

    server.answer = refuse

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.generate("x")

    with pytest.raises(ServerError, match="in flight") as caught:
        asyncio.run(ask(server.url))
    assert caught.value.status == "ALREADY_EXISTS"
    with pytest.raises(ServerError, match="no gRPC server answers at localhost:9") as caught:
        asyncio.run(ask("localhost:9"))
    assert caught.value.status == "UNAVAILABLE"


def test_a_stream_without_an_end_is_an_error(server: FakeServer) -> None:
    def hang_up(asked: Asked) -> Iterator[Response]:
        yield response(asked, "a", "NOT_FINISHED")
        raise HangUp

    server.answer = hang_up

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


def test_a_stream_serves_one_request_after_another(server: FakeServer) -> None:
    server.answer = refuse_texts

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            for _ in range(10):
                assert (await client.generate([1])).token_ids == (5, 6, 7)
                with pytest.raises(ServerError, match="maximum queue size"):
                    await client.generate("x")
                await client.cancel("nobody")
            assert server.num_streams == 1
            answers = await asyncio.gather(*(client.generate([1]) for _ in range(4)))
            assert len(answers) == 4 and server.num_streams == 4
            deltas = client.stream([1])
            await anext(deltas)
            await deltas.aclose()
            assert await asyncio.to_thread(server.ended.acquire, timeout=PATIENCE_S)
            assert (await client.generate([1])).token_ids == (5, 6, 7) and server.num_streams == 4

    asyncio.run(ask())
    assert all(server.ended.acquire(timeout=PATIENCE_S) for _ in range(3))


def test_a_restarted_server_gets_a_new_stream(server: FakeServer) -> None:
    async def ask() -> int:
        async with AsyncClient(server.url) as client:
            await client.generate("x")
            await asyncio.to_thread(server.close)
            with pytest.raises(ServerError) as caught:
                await client.generate("x")
            assert caught.value.status == "UNAVAILABLE"
            again = FakeServer(server.port)
            deadline = time.monotonic() + PATIENCE_S  # gRPC reconnects after a time of its own choice
            while True:
                try:
                    assert (await client.generate("x")).text == (await client.generate("y")).text == "abc"
                    break
                except ServerError as error:
                    assert error.status == "UNAVAILABLE" and time.monotonic() < deadline
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(again.close)
            return again.num_streams

    assert asyncio.run(ask()) == 1
