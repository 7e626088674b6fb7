"""gpt-oss' answers: messages of channels, in any pieces, compared with the messages that were written."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.serving.chat.reasoning import ReasoningTokens, reasoning_stream
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_deltas import ChatDelta
from tests.tiers import examples

CALL_HEADERS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>analysis to=functions.{} code<|message|>",
)


@dataclass(frozen=True)
class Message:
    """A message of an answer: analysis, final, commentary, or the number of a header of a call."""

    kind: str
    text: str

    def written(self, is_first: bool, is_last: bool) -> str:
        """The message as the model writes it; the prompt has the beginning of the first header."""
        if self.kind.isdecimal():
            header, end = CALL_HEADERS[int(self.kind)].format("area"), "" if is_last else "<|call|>"
        else:
            header, end = f"<|channel|>{self.kind}<|message|>", "<|end|>"
        return f"{'' if is_first else '<|start|>assistant'}{header}{self.text}{end}"


def written(messages: list[Message]) -> str:
    last = len(messages) - 1
    return "".join(each.written(index == 0, index == last) for index, each in enumerate(messages))


def read(parts: list[str], is_cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the content, and the name and the arguments of each call."""
    reasoning, tools = reasoning_stream("openai_gptoss", False), tool_call_stream("openai")
    told: list[str] = []
    deltas: list[ChatDelta] = []
    for thought, content in (*map(reasoning.add, parts), reasoning.finish(is_cut)):
        told.append(thought)
        deltas.append(tools.add(content))
    deltas.append(tools.finish(is_cut))
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.name:
            calls.append((call.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(told), "".join(delta.content for delta in deltas), calls


texts = st.text("ab <|{}\n😀", min_size=1, max_size=8).map(lambda text: f"x{text}y")
arguments = st.dictionaries(st.sampled_from("ab"), texts | st.just("<|end|> {"), max_size=2).map(json.dumps)
messages = st.lists(
    st.builds(Message, st.sampled_from(["analysis", "commentary", "final"]), texts)
    | st.builds(Message, st.sampled_from("0123"), arguments),
    min_size=1,
    max_size=5,
)


@given(messages, st.lists(st.integers(0, 400), max_size=10))
@settings(max_examples=examples(60, all=2000), deadline=None)
def test_messages_are_read_in_any_pieces(sent: list[Message], cuts: list[int]) -> None:
    text = written(sent)
    places = sorted({cut for cut in cuts if cut < len(text)})
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)])]
    reasoning, content, calls = read([text])
    assert (reasoning, content, calls) == read(list(text)) == read(pieces)
    assert reasoning == "\n\n".join(each.text for each in sent if each.kind == "analysis")
    said = "".join(each.text for each in sent if each.kind in ("commentary", "final"))
    assert content.replace("\n", "") == said.replace("\n", "")
    assert calls == [("area", each.text) for each in sent if each.kind.isdecimal()]


@given(messages, st.integers(0, 400), st.booleans())
@settings(max_examples=examples(60, all=2000), deadline=None)
def test_an_answer_that_is_cut_off_shows_no_marks(sent: list[Message], length: int, is_cut: bool) -> None:
    text = written(sent)[:length]
    found = read([text], is_cut)
    assert found == read(list(text), is_cut)
    if is_cut and not text.endswith("<") and "<|" not in "".join(each.text for each in sent):
        assert not any(mark in found[1] for mark in ("<|channel|>", "<|start|>", "<|message|>", "functions."))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Yes <|end|> no", ("", "Yes <|end|> no", [])),
        ('{"a": 1}', ("", '{"a": 1}', [])),
        (" \n", ("", " \n", [])),
        ("Yes<|channel|>final<|message|>No", ("", "Yes\n\nNo", [])),
        (f"<|channel|>final{' ' * 1008}<|message|>b", ("", "b", [])),
        (f"<|channel|>{'a' * 2000}<|message|>b", ("", f"<|channel|>{'a' * 2000}<|message|>b", [])),
        ("<|channel|>analysis<|message|>", ("", "", [])),
        ("<|channel|>final<|message|>a<|return|>", ("", "a", [])),
    ],
)
def test_texts_without_headers_are_content(text: str, wanted: object) -> None:
    assert read([text]) == read(list(text)) == wanted


def test_only_analysis_counts_as_reasoning() -> None:
    tokens = [
        *("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>"),
        *(
            "<|start|>",
            "assistant",
            "<|channel|>",
            "commentary",
            " to=functions.f",
            "<|message|>",
            "{}",
            "<|call|>",
        ),
        *("<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "So", "<|end|>"),
        *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes"),
    ]
    for size in (1, 3, len(tokens)):
        counter = ReasoningTokens(
            reasoning_stream("openai_gptoss", False), [each.encode() for each in tokens]
        )
        groups = [range(start, min(start + size, len(tokens))) for start in range(0, len(tokens), size)]
        assert sum(map(counter.add, groups)) == 6 + 7
