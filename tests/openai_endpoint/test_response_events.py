"""Events of /v1/responses: however an answer is cut into pieces, they join to the same response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request.response import TopLogProbs
from inflight.openai.answers import Piece, Usage
from inflight.openai.chat_prompts import ChatPrompt
from inflight.openai.log_probs import TokenNames
from inflight.openai.protocol import ChatBody
from inflight.openai.responses.writer import ResponseWriter
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO
from tests.openai_endpoint.test_message_events import answers as answers_of_formats
from tests.tiers import examples

TOKENIZER = Tokenizer.from_dir(DEMO)
TABLE = TOKENIZER.token_bytes()
PARTS = (
    *("<think>", "</think>", "hmm ", "text", " ", "\n", "<tool", "<", "{", '{"name"', "</tool_call>"),
    '<tool_call>\n{"name": "area", "arguments": {"r": 2}}\n</tool_call>',
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    '<tool_call>\n{"name": "area", "arguments": {"r": ',
    "<tool_call>no call</tool_call>",
)
Event = dict[str, Any]


def make_writer(
    parallel: bool = True, parsers: tuple[str, str] = ("hermes", "think"), **fields: Any
) -> ResponseWriter:
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "parallel_tool_calls": parallel,
            **fields,
        }
    )
    prompt = ChatPrompt("x", None, parsers[0], False, parsers[1], False, TABLE)
    prepared: Any = SimpleNamespace(
        usage=Usage([], 16),
        names=TokenNames(TABLE, False) if body.logprobs else None,
        hidden_ids=frozenset(),
        model_name="demo",
    )
    return ResponseWriter("resp_1", body, prompt, prepared, {"metadata": {}})


def pieces_of(groups: Sequence[Sequence[int]], reason: str, texts: Sequence[str]) -> list[Piece]:
    """One piece for each group of tokens; the last one ends the answer."""
    pieces = [
        Piece(
            0,
            0,
            text,
            tuple(ids),
            log_probs=tuple(-0.5 for _ in ids),
            top_log_probs=tuple(TopLogProbs((token_id,), (-0.5,)) for token_id in ids),
        )
        for ids, text in zip(groups, texts, strict=True)
    ]
    pieces[-1].finish_reason, pieces[-1].is_cut = reason, reason == "length"
    return pieces


def cut(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The values between the places, without empty groups except for an empty answer."""
    ends = [0, *sorted({place % (len(values) + 1) for place in places} - {0, len(values)}), len(values)]
    return [values[begin:end] for begin, end in pairwise(ends)]


def written(writer: ResponseWriter, pieces: Sequence[Piece]) -> list[Event]:
    for piece in pieces:
        writer.add(piece)
    frames = writer._take_events().decode().split("\n\n")
    return [json.loads(frame.split("data: ", 1)[1]) for frame in frames[:-1]]


def joined(events: Sequence[Event]) -> list[Event]:
    """The events without random ids and times, with consecutive deltas of an item joined."""
    text = json.dumps(list(events))
    for number, found in enumerate(dict.fromkeys(_ids(events))):
        text = text.replace(found, f"id{number}")
    told: list[Event] = []
    for event in json.loads(text):
        event.pop("sequence_number")
        for name in ("created_at", "completed_at"):
            event.get("response", {}).pop(name, None)
        event.get("response", {}).pop("usage", None)  # these pieces may have no tokens
        last = told[-1] if told else {}
        if event["type"].endswith(".delta") and last.get("type") == event["type"]:
            last["delta"] += event["delta"]
            last["logprobs"] = last.get("logprobs", []) + event.get("logprobs", [])
        else:
            told.append({"logprobs": [], **event} if event["type"].endswith(".delta") else event)
    return told


def _ids(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in cast(list[Any], value) for found in _ids(each)]
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in ("id", "item_id", "call_id") if name in value]
    return own + [found for each in cast(dict[str, Any], value).values() for found in _ids(each)]


def accumulated(events: Sequence[Event]) -> list[Event]:
    """The output that a client builds from added items, parts and deltas alone."""
    items: dict[int, Event] = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items[event["output_index"]] = event["item"]
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
            case _:
                pass
    return list(items.values())


answers = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
places = st.lists(st.integers(0, 400), max_size=30)


@settings(max_examples=examples(150, all=3000), deadline=None)
@given(
    answers.map(lambda text: (("hermes", "think"), text)) | answers_of_formats,
    places,
    st.sampled_from(["stop", "length"]),
    st.booleans(),
)
def test_events_do_not_depend_on_how_the_text_is_cut(
    said: tuple[tuple[str, str], str], places: list[int], reason: str, parallel: bool
) -> None:
    parsers, answer = said
    whole = written(make_writer(parallel, parsers), pieces_of([()], reason, [answer]))
    parts = cut(answer, places)
    pieces = written(make_writer(parallel, parsers), pieces_of([()] * len(parts), reason, parts))
    assert joined(pieces) == joined(whole)
    assert [event["sequence_number"] for event in pieces] == list(range(len(pieces)))
    assert accumulated(pieces) == pieces[-1]["response"]["output"]


@settings(max_examples=examples(100, all=2000), deadline=None)
@given(answers, places, st.sampled_from(["stop", "length"]))
def test_log_probs_do_not_depend_on_how_the_tokens_are_cut(
    answer: str, places: list[int], reason: str
) -> None:
    ids = TOKENIZER.encode(answer, add_special_tokens=False)
    fields = {"logprobs": True, "top_logprobs": 1}

    def events_of(groups: list[list[int]]) -> list[Event]:
        texts = [b"".join(TABLE[token_id] for token_id in group).decode() for group in groups]
        return written(make_writer(**fields), pieces_of(groups, reason, texts))

    pieces = events_of(cut(ids, places))
    assert joined(pieces) == joined(events_of([list(ids)]))
    assert accumulated(pieces) == pieces[-1]["response"]["output"]
    for item in pieces[-1]["response"]["output"]:
        if item["type"] == "message":
            (part,) = item["content"]
            tokens = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
            if "<" not in part["text"]:  # else the beginning of the text is not told from that of a mark
                assert part["text"] in tokens  # a token at an end may also belong to a mark


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("yes", ["message"]),
        ("<think>a</think>", ["reasoning"]),
        ("<think>a</think>yes", ["reasoning", "message"]),
        (f"yes {PARTS[11]} no", ["message", "function_call", "message"]),
        (f"{PARTS[11]}\n{PARTS[12]}", ["function_call", "function_call"]),
        ("", ["message"]),
    ],
)
def test_items_are_in_the_order_of_the_text(answer: str, kinds: list[str]) -> None:
    writer = make_writer()
    written(writer, pieces_of([()], "stop", [answer]))
    assert [item["type"] for item in writer.output] == kinds


def test_items_of_channels_are_in_the_order_of_the_text() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d"
    )
    for texts in ([text], list(text)):
        writer = make_writer(parsers=("openai", "openai_gptoss"))
        written(writer, pieces_of([()] * len(texts), "stop", texts))
        found = [(item["type"], (item.get("content") or [{}])[0].get("text", "")) for item in writer.output]
        assert found == [
            ("reasoning", "a"),
            ("message", "b"),
            ("function_call", ""),
            ("reasoning", "c"),
            ("message", "d"),
        ]


@pytest.mark.parametrize(
    ("second", "texts"),
    [
        ("final<|message|>", ["I check. It is done."]),
        (
            "commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>",
            ["I check.", " It is done."],
        ),
    ],
)
def test_log_probs_of_messages_in_channels_are_those_of_their_tokens(second: str, texts: list[str]) -> None:
    """The line ends between two messages are no tokens, and the headers are no text."""
    answer = (
        "<|channel|>commentary<|message|>I check.<|end|>"
        f"<|start|>assistant<|channel|>{second} It is done.<|end|>"
    )
    ids = TOKENIZER.encode(answer, add_special_tokens=False)
    fields: dict[str, Any] = {"logprobs": True, "parsers": ("openai", "openai_gptoss")}
    for groups in ([list(ids)], [[token_id] for token_id in ids]):
        writer = make_writer(**fields)
        pieces = [b"".join(TABLE[token_id] for token_id in group).decode() for group in groups]
        written(writer, pieces_of(groups, "stop", pieces))
        messages = [item["content"][0] for item in writer.output if item["type"] == "message"]
        found = ["".join(entry["token"] for entry in part["logprobs"]) for part in messages]
        assert found == texts


def test_a_cancelled_response_has_what_was_generated() -> None:
    writer = make_writer()
    writer.add(Piece(0, 0, "yes <tool_", ()))
    writer.end("cancelled")
    writer.add(Piece(0, 0, "more", (), "stop"))
    response = writer.response()
    assert response["status"] == "cancelled" and response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "yes "
