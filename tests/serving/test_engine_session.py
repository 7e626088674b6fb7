"""Streams of outputs on an event loop, whose reader may be slower than the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason
from inflight.errors import Cancelled, StepFailed
from inflight.serving.engine_session import EngineSession, OutputStream
from inflight.serving.reply import Output, new_text
from tests.triton.factories import FakeEngineClient, make_prompt, make_response
from tests.triton.letters import letter_tokenizer

ReceivedOutputs = list[list[tuple[int, int, tuple[int, ...]]]]
"""Outputs received together: batch index, sequence index, token ids."""


def as_tuples(outputs: list[Output]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (each.batch_index, each.result.sequence_index, each.result.output_token_ids[0]) for each in outputs
    ]


async def read(stream: OutputStream) -> ReceivedOutputs:
    return [as_tuples(outputs) async for outputs in stream]


def run(scenario: Callable[[EngineSession, FakeEngineClient], Awaitable[None]]) -> FakeEngineClient:
    """Run `scenario` on an event loop; return the client after all requested stops."""
    client = FakeEngineClient(answers_stops=False)

    async def main() -> None:
        session = EngineSession(client)
        try:
            await scenario(session, client)
        finally:
            session.close()

    asyncio.run(main())
    return client


async def started(session: EngineSession, count: int = 1) -> OutputStream:
    prompt = make_prompt(options={"streaming": True}, streaming=True)
    stream = session.open([(prompt, None)] * count)
    await stream.start()
    return stream


def test_responses_for_a_slow_reader_are_joined() -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        stream = await started(session)
        for token in range(50):
            client.respond(make_response(client.last_id, (token,)))
        first = as_tuples(await anext(stream))
        client.respond(make_response(client.last_id, (50,), FinishReason.LENGTH))
        assert [first, *await read(stream)] == [[(0, 0, tuple(range(50)))], [(0, 0, (50,))]]

    assert run(scenario).stopped == []


def test_outputs_have_their_indices_and_end_with_the_final_response() -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        stream = await started(session, 2)
        first, second = client.submitted
        client.respond(make_response(second, (1,), sequence_index=1))
        client.respond(make_response(first, (2,), sequence_index=1))
        client.respond(make_response(first, (3,)))
        client.respond(make_response(first, (4,), FinishReason.LENGTH, sequence_index=1))
        client.respond(make_response(second, (5,), FinishReason.LENGTH))
        (outputs,) = await read(stream)
        assert sorted(outputs) == [(0, 0, (3,)), (0, 1, (2, 4)), (1, 0, (5,)), (1, 1, (1,))]
        of_first = [each for each in outputs if each[0] == 0]
        assert of_first[-1] == (0, 1, (2, 4))

    run(scenario)


def test_the_event_loop_is_woken_once_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        streams = [await started(session) for _ in range(3)]
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args)))
        for engine_id in client.submitted:
            client.respond(make_response(engine_id, (7,)))
        for engine_id in client.submitted:
            client.respond(make_response(engine_id, (8,), FinishReason.LENGTH))
        assert len(calls) == 1
        monkeypatch.undo()
        assert [await read(stream) for stream in streams] == [[[(0, 0, (7, 8))]]] * 3

    run(scenario)


def test_an_error_of_one_prompt_ends_the_other_prompts() -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        stream = await started(session, 2)
        first = min(client.submitted)
        client.respond(make_response(first, (1,)))
        client.respond(Response(first, error=StepFailed("boom"), is_final=True))
        with pytest.raises(StepFailed, match="boom"):
            await anext(stream)
        assert await read(stream) == []

    client = run(scenario)
    assert (max(client.submitted), StopReason.CANCELLED) in client.stopped


def test_a_gone_client_ends_its_requests_once() -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        stream = await started(session, 2)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.cancel()
        stream.close()
        with pytest.raises(Cancelled):
            await reading

    client = run(scenario)
    assert client.stopped == [(engine_id, StopReason.CANCELLED) for engine_id in client.submitted]


def test_a_stop_string_ends_only_its_sequence() -> None:
    async def scenario(session: EngineSession, client: FakeEngineClient) -> None:
        tokenizer = letter_tokenizer()
        prompt = make_prompt(options={"streaming": True, "stop_strings": ("b",)}, streaming=True)
        stream = session.open([(prompt, new_text(prompt, tokenizer))])
        await stream.start()
        client.respond(make_response(client.last_id, tokenizer.encode("ab"), sequence_index=1))
        (output,) = await anext(stream)
        assert output.texts == ("a",) and output.result.sequence_index == 1
        stream.close()

    client = run(scenario)
    assert client.stopped == [
        (client.last_id, StopReason.STOP_WORDS, 1),
        (client.last_id, StopReason.CANCELLED),
    ]
