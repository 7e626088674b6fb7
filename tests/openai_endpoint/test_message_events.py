"""Anthropic's events of an answer add up to the same message, however its text is divided into pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from inflight.openai.answers import Piece, Usage
from inflight.openai.chat_prompts import ChatPrompt
from inflight.openai.messages.answers import MessageWriter
from inflight.openai.protocol import ChatBody
from tests.tiers import examples

FRAGMENTS = [
    '<tool_call>{"name": "area", "arguments": {"r": 2, "unit": "m"}}</tool_call>',
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "<think>hmm </think>",
    "one ",
    " two",
    "\n\n",
    "<tool_call>",
    "{",
    "😀",
]
HARMONY = [
    "<|channel|>analysis<|message|>hmm <|end|>",
    '<|start|>assistant<|channel|>commentary to=functions.area <|constrain|>json<|message|>{"r": 2}<|call|>',
    "<|start|>assistant<|channel|>final<|message|>one two<|end|>",
    "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}",
    " two",
    "\n\n",
    "<|channel|>",
    "<|",
    "😀",
]
XML = [
    "<think>hmm </think>",
    "<tool_call>\n<function=area>\n<parameter=r>\n2\n</parameter>\n</function>\n</tool_call>",
    "<tool_call><function=time></function></tool_call>",
    "one ",
    "<tool_call>",
    "<function=",
    "\n\n",
    "😀",
]
PYTHON = ["[area(r=2, unit='m'), time()]", "[", "one ", "\n\n", "[time()]", "<think>hmm </think>", "😀"]
FORMATS = {  # parts of answers by the names of the parsers of calls and of reasoning
    ("hermes", "think"): FRAGMENTS,
    ("openai", "openai_gptoss"): HARMONY,
    ("qwen3_coder", "think"): XML,
    ("pythonic", "think"): PYTHON,
}
answers = st.sampled_from(sorted(FORMATS)).flatmap(
    lambda parsers: st.tuples(
        st.just(parsers), st.lists(st.sampled_from(FORMATS[parsers]), max_size=5).map("".join)
    )
)
"""(names of the parsers, text) of an answer."""
EVENT = TypeAdapter[Any](RawMessageStreamEvent)


def writer(only_one: bool, parsers: tuple[str, str]) -> MessageWriter:
    request = SimpleNamespace(max_new_tokens=99, prompt_length=5)
    prompt: Any = SimpleNamespace(request=request)
    prepared = SimpleNamespace(usage=Usage([prompt], 16), model_name="demo", prompts=[(prompt, None)])
    body = ChatBody.model_validate({"messages": [{"role": "user"}], "parallel_tool_calls": not only_one})
    chat = ChatPrompt("", None, parsers[0], False, parsers[1], False, ())
    return MessageWriter(body, cast(Any, prepared), chat, "msg_1", 99)


def pieces_of(text: str, cuts: list[int], reason: str, stop: str) -> list[Piece]:
    places = sorted({cut for cut in cuts if cut < len(text)} | {0, len(text)})
    texts = [text[begin:end] for begin, end in pairwise(places)] or [""]
    pieces = [Piece(0, 0, each, ()) for each in texts]
    pieces[-1].finish_reason, pieces[-1].stop_string = reason, stop
    pieces[-1].is_cut = reason == "length" or bool(stop)
    return pieces


def events_of(made: MessageWriter, pieces: list[Piece]) -> list[dict[str, Any]]:
    async def all_events() -> bytes:
        async def given() -> AsyncIterator[list[Piece]]:
            for piece in pieces:
                yield [piece]

        return b"".join([each async for each in made.events(given())])

    frames = asyncio.run(all_events()).decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


def plain(message: Message) -> dict[str, Any]:
    """Return a message without the random ids of its calls, and without the client's own fields."""
    told = message.to_dict()
    dropped = {"id", "parsed_output"}
    content = [{name: each[name] for name in each.keys() - dropped} for each in cast(Any, told["content"])]
    return {**told, "content": content}


@given(
    answers,
    st.lists(st.integers(0, 200), max_size=40),
    st.sampled_from([("stop", ""), ("stop", "end"), ("length", "")]),
    st.booleans(),
)
@settings(max_examples=examples(100, all=2000), deadline=None)
def test_events_add_up_to_the_whole_message(
    answer: tuple[tuple[str, str], str], cuts: list[int], end: tuple[str, str], only_one: bool
) -> None:
    parsers, text = answer
    whole = writer(only_one, parsers).whole(Piece.joined(pieces_of(text, [], *end)))
    events = events_of(writer(only_one, parsers), pieces_of(text, cuts, *end))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    num_begun, is_open = 0, False
    for each in events:
        kind = each["type"]
        assert (kind == "message_start") == (snapshot is None)
        if kind.startswith("content_block"):
            num_begun += kind == "content_block_start"
            assert each["index"] == num_begun - 1 and is_open == (kind != "content_block_start")
            is_open = kind != "content_block_stop"
        parsed = EVENT.validate_python(each)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert not is_open and [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]
    assert plain(snapshot) == plain(Message.model_validate(whole))
    assert events[-2]["delta"]["stop_sequence"] == (end[1] or None)
