"""Separation of reasoning from answers, in any pieces, alone and before tool calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InvalidArgument
from inflight.serving.chat.reasoning import (
    ReasoningTokens,
    ends_reasoning,
    opens_reasoning,
    reasoning_stream,
    starts_inside,
)
from inflight.serving.chat.reasoning_formats import REASONING_FORMATS, REASONING_PARSERS
from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.template_files import TemplateFiles
from tests.serving.chat.answers import Answer, read, write_calls
from tests.serving.chat.template_folders import source
from tests.tiers import examples


def split(parts: list[str], starts_inside: bool = False, parser: str = "think") -> tuple[str, str]:
    stream = reasoning_stream(parser, starts_inside)
    pairs = [*(stream.add(part) for part in parts), stream.finish()]
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, "Hm.", "Yes. "),
        ("\n<think>Hm.</think>Yes", False, "Hm.", "Yes"),
        ("Hm.\n</think>\n\nYes", True, "Hm.", "Yes"),
        ("<think></think>Yes", False, "", "Yes"),
        ("<think>a <think> b </think> c </think>", False, "a <think> b", "c </think>"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("never ends", True, "never ends", ""),
        (" Yes, <think>no</think>", False, "", " Yes, <think>no</think>"),
        ("<thin", False, "", "<thin"),
        (" \n", False, "", " \n"),
        ("", True, "", ""),
    ],
)
def test_examples_of_reasoning_are_separated_from_content(
    text: str, starts_inside: bool, reasoning: str, content: str
) -> None:
    assert split([text], starts_inside) == (reasoning, content)
    assert split(list(text), starts_inside) == (reasoning, content)


@pytest.mark.parametrize("parser", [name for name, form in REASONING_FORMATS.items() if form.closing])
def test_the_mark_behind_an_answer_is_dropped(parser: str) -> None:
    form = REASONING_FORMATS[parser]
    for skipped in ("", *form.skipped):
        begun = f"{form.begin}\nHm.\n{form.end}\n{skipped}\nYes <b> \n"
        for text in (f"{begun}{form.closing}", f"{begun}\n{form.closing}\n "):
            for parts in ([text], list(text)):
                assert split(parts, parser=parser) == ("Hm.", "Yes <b>")
        cut = f"{begun}{form.closing[:-1]}"
        for parts in ([cut], list(cut)):
            stream = reasoning_stream(parser, False)
            contents = [stream.add(part)[1] for part in parts] + [stream.finish(is_cut=True)[1]]
            assert "".join(contents).rstrip() == "Yes <b>"


FRAGMENTS = ["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "b c"]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), st.booleans(), st.data())
@settings(max_examples=examples(fast=60, all=150), deadline=None)
def test_reasoning_does_not_depend_on_how_the_text_is_divided(
    text: str, starts_inside: bool, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]
    assert split(parts, starts_inside) == split([text], starts_inside) == split(list(text), starts_inside)
    reasoning, content = split(parts, starts_inside)
    # Compared with str.partition: only white space and the two marks are dropped.
    inside = text if starts_inside else text.lstrip().removeprefix("<think>")
    if starts_inside or inside != text.lstrip():
        thought, _, rest = inside.partition("</think>")
        assert (reasoning, content) == (thought.strip(), rest.lstrip())
    else:
        assert (reasoning, content) == ("", text)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("hmm</think>answer", True, "hmm", "answer"),
        (" \n<think>\nhmm</think>\nanswer", True, "hmm", "answer"),
        ("<thin", True, "<thin", ""),
        ("answer", False, "", "answer"),
    ],
)
def test_deepseek_r1_reasoning_may_lack_its_opening_mark(
    text: str, starts_inside: bool, reasoning: str, content: str
) -> None:
    for parts in ([text], list(text)):
        assert split(parts, starts_inside, "deepseek_r1") == (reasoning, content)


def test_parser_and_prompt_decide_whether_an_answer_starts_with_reasoning() -> None:
    def begins(parser: str, prompt: str, final_content: str | None = None) -> bool:
        final = None if final_content is None else {"role": "assistant", "content": final_content}
        return starts_inside(parser, prompt, final)

    assert (
        begins("deepseek_r1", "Hi") and begins("deepseek_r1", "Hi<think>\n") and begins("think", "Hi<think>")
    )
    assert not begins("deepseek_r1", "Hi<think></think>\n") and not begins("think", "Hi")
    assert not begins("deepseek_r1", "Hi. Well", "Well") and not begins("", "Hi<think>")


def test_without_a_parser_all_is_content() -> None:
    assert split(["<think>a</think> b"], parser="") == ("", "<think>a</think> b")
    assert split(["a</think> b"], True, parser="") == ("", "a</think> b")


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'thoughts', expected one of think, deepseek_r1"):
        reasoning_stream("thoughts", False)


def test_templates_may_open_the_reasoning() -> None:
    question = {"role": "user", "content": "Why <think>"}
    answer = {"role": "assistant", "content": "<think>\nBecause"}
    for name, opens in (("qwen3_thinking", True), ("deepseek_r1", True), ("qwen3", False), ("chatml", False)):
        chat = ChatTemplate(TemplateFiles({"default": source(name)}, {"bos_token": "<s>"}, name))
        assert opens_reasoning(chat.render([question])) is opens
        if name == "chatml":
            prompt = chat.render([question, answer], add_generation_prompt=False, continue_final_message=True)
            assert prompt.endswith("<think>\nBecause")
            assert opens_reasoning(prompt, answer)
            assert not opens_reasoning(prompt, {**answer, "content": "<think>a</think>b"})


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_tool_calls_may_follow_reasoning(parser: str) -> None:
    calls = (("weather", {"city": "Zürich"}), ("now", {}))
    thought = 'Call <tool_call>{"name": "no", "arguments": {}}</tool_call>?'
    text = f"<think>\n{thought}\n</think>\n\n" + write_calls(parser, calls)
    for parts in ([text], list(text)):
        reasoning, content = split(parts)
        assert reasoning == thought
        assert read(parser, [content]) == Answer("", calls)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("never ends </thin", True, "never ends", ""),
        ("<think>a </", False, "a", ""),
        ("<think>a <", False, "a <", ""),
        ("\n<thi", False, "", ""),
        ("<", False, "", "<"),
        ("<think>a</think>b </thi", False, "a", "b </thi"),
    ],
)
def test_a_cut_mark_is_dropped(text: str, inside: bool, reasoning: str, content: str) -> None:
    stream = reasoning_stream("think", inside)
    pairs = [stream.add(text), stream.finish(is_cut=True)]
    assert "".join(pair[0] for pair in pairs) == reasoning
    assert "".join(pair[1] for pair in pairs) == content


@pytest.mark.parametrize(
    ("tokens", "inside", "parser", "count"),
    [
        (["<think>", "a", " b", "</think>", "\n", "c"], False, "think", 4),
        (["a", "é", "</", "think", ">", "c"], True, "think", 5),
        (["\n", "<th", "ink>", "a"], False, "think", 4),
        (["a", "<think>"], False, "think", 0),
        (["a", "</think>", "b"], False, "deepseek_r1", 0),
        (["a", "</think>", "b"], True, "deepseek_r1", 2),
        (["<think>a</think>b", "c"], False, "think", 1),
        (["a"], False, "", 0),
        ([], True, "think", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(tokens: list[str], inside: bool, parser: str, count: int) -> None:
    table = [token.encode() for token in tokens]
    for size in (1, 2, 100):
        counter = ReasoningTokens(reasoning_stream(parser, inside), table)
        pieces = (range(start, min(start + size, len(table))) for start in range(0, len(table), size))
        assert sum(map(counter.add, pieces)) == count
    counter.add([1 << 20])  # no token of the table


def test_a_prompt_may_end_after_reasoning() -> None:
    assert ends_reasoning("<think>\n\n</think>\n\n") and not ends_reasoning("</think>\n<think>\n")
    assert not ends_reasoning("") and not ends_reasoning("x</think> y")
    assert ends_reasoning("rendered", {"content": "<think>a</think>b"})
    assert not ends_reasoning("rendered", {"content": "<think>a</think>b<think>c"})


@pytest.mark.parametrize("parser", REASONING_PARSERS)
def test_every_format_is_separated_in_any_pieces(parser: str) -> None:
    form = REASONING_FORMATS[parser]
    for skipped in ("", *form.skipped):
        text = f"{form.begin}\nHm.\n{form.end}\n{skipped}\nYes {form.end} <"
        for parts in ([text], list(text)):
            assert split(parts, parser=parser) == ("Hm.", f"Yes {form.end} <")
        rest = text.removeprefix(form.begin)
        assert split(list(rest), True, parser) == split([rest], True, parser)
        assert split([f"{skipped} Yes" if skipped else "Yes"], parser=parser) == ("", "Yes")
    assert opens_reasoning(f"Hi{form.begin}\n", parser=parser)
    assert starts_inside(parser, f"Hi{form.begin}\n") and ends_reasoning(f"Hi{form.end}\n\n", parser=parser)
    named = "think" if form.end[2:] == "think>" else parser
    source_text = f"{{# {form.begin} {form.end} #}}{{{{ messages[0].content }}}}"
    assert ChatTemplate(TemplateFiles({"default": source_text}, {}, "x")).reasoning_style == named
