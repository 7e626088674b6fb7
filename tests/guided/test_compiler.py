"""The guide compiler: known, invalid, too long and too slow guides, and a killed process."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import Origin
from inflight.errors import InvalidArgument, Unsupported
from inflight.guided.compiler import ChildCompiler, GuideBounds
from inflight.guided.grammars import GrammarLibrary, Grammars
from inflight.log_lines import LineFormatter
from tests.commands import children_running
from tests.guided.at_random import make_bomb
from tests.guided.factories import grammars_of, tiny_backend, tiny_grammars, tiny_vocabulary
from tests.tiers import with_all

GOOD = Guide(GuideKind.REGEX, "[a-d]{3}")


class Compiling:
    """A compiler and its events."""

    def __init__(self, compiler: ChildCompiler, notified: queue.SimpleQueue[None]) -> None:
        self.compiler = compiler
        self.notified = notified

    def submit(self, number: int, guide: Guide, origin: Origin | None = None) -> None:
        self.compiler.submit(number, guide, origin)

    def next(self) -> tuple[GuideEvent, ...]:
        """Wait for the next events; return all that arrive together."""
        if not (events := self.compiler.events()):
            self.notified.get(timeout=600)
            events = self.compiler.events()
        return events


@contextmanager
def compiling(
    grammars: Grammars | None = None,
    bounds: GuideBounds | None = None,
    name: str = "llguidance",
    **changes: Any,
) -> Iterator[Compiling]:
    notified: queue.SimpleQueue[None] = queue.SimpleQueue()
    compiler = ChildCompiler(
        grammars or tiny_grammars(), name, bounds or GuideBounds(), lambda: notified.put(None), **changes
    )
    try:
        yield Compiling(compiler, notified)
    finally:
        compiler.close()
    assert not children()


def children() -> list[psutil.Process]:
    return children_running("guided")


@pytest.mark.parametrize("name", with_all(["llguidance", "xgrammar"], ["llguidance"]))
def test_a_guide_is_compiled_once_for_all_requests(name: str) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    grammars = tiny_grammars(name=name)
    with compiling(grammars, name=name) as it:
        it.submit(1, GOOD)
        it.submit(2, GOOD)
        assert it.next() == (GuideEvent(1), GuideEvent(2))
        assert GOOD in grammars
        it.submit(3, GOOD)
        assert it.compiler.events() == (GuideEvent(3),), "at once"


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Guide(GuideKind.REGEX, "(a"), "unclosed group"),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "line 1"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "foo"}'), 'at #: type is "foo"'),
        (Guide(GuideKind.JSON_SCHEMA, '{"not": {}}'), "the schema is false"),
        (Guide(GuideKind.EBNF_GRAMMAR, "root = x"), "Expected ::="),
        (Guide(GuideKind.STRUCTURAL_TAG, "{}"), "structures"),
    ],
)
def test_an_invalid_guide_is_refused_and_its_error_kept(guide: Guide, message: str) -> None:
    with compiling() as it:
        it.submit(1, guide)
        (event,) = it.next()
        assert (event.request_id, event.error_kind) == (1, "INVALID_ARG")
        assert "guided_decoding_guide" in event.error and message in event.error
        it.submit(2, guide)
        (again,) = it.compiler.events()
        assert (again.request_id, again.error) == (2, event.error)


@pytest.mark.parametrize(
    "schema",
    [
        '{"not": {}}',
        '{"type": "array", "items": {"uniqueItems": true}}',
        '{"type": "object", "properties": {"a": {"if": {}}}}',
        '{"minimum": 5}',
        '{"type": "string", "pattern": "^a*$", "minLength": 2}',
        '{"type": "object", "properties": {"a": {}}, "minProperties": 2}',
        '{"type": "object", "properties": {"a": {}}, "required": ["b"]}',
        '{"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}',
        '{"$ref": "#anchor"}',
        '{"$ref": "http://localhost/schema"}',
    ],
)
def test_keywords_that_xgrammar_would_ignore_are_refused(schema: str) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    with pytest.raises(InvalidArgument, match="xgrammar does not enforce the keyword"):
        tiny_backend("xgrammar").compile(Guide(GuideKind.JSON_SCHEMA, schema))
    tiny_backend("xgrammar").compile(
        Guide(
            GuideKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"not": {"enum": [{"if": 1}]}}, "required": ["not"]}',
        )
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"type": "string"}},
        {"propertyNames": {"type": "string"}, "uniqueItems": False},
        {"type": "array", "minContains": 0},
        {"type": "array", "contains": {"type": "null"}, "minContains": 0},
    ],
)
def test_xgrammar_accepts_keywords_without_an_effect(schema: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    tiny_backend("xgrammar").compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
    with pytest.raises(InvalidArgument, match="does not enforce the keyword contains"):
        asked = {"type": "array", "contains": {}, "minContains": 0, "maxContains": 1}
        tiny_backend("xgrammar").compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(asked)))


@pytest.mark.parametrize("rest", [{"sequence": {}}, {"triggers": ["<f>"]}])
def test_xgrammar_refuses_white_space_options_of_a_structural_tag(rest: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")

    def guide(options: Any) -> Guide:
        structures = [
            {"begin": "<f>", "schema": {}, "end": "</f>"},
            {"begin": "<f>", "schema": {"x-guidance": options}, "end": "", "name": "find"},
        ]
        return Guide(GuideKind.STRUCTURAL_TAG, json.dumps({"structures": structures, **rest}))

    for options in ({"whitespace_flexible": False}, {"whitespace_pattern": " ?"}, {"whitespace_pattern": ""}):
        with pytest.raises(
            InvalidArgument, match="at the tool find, #/x-guidance: xgrammar takes no white space"
        ):
            tiny_backend("xgrammar").compile(guide(options))
    with pytest.raises(InvalidArgument, match="at the tool find, #/x-guidance: x-guidance is 3, expected"):
        tiny_backend("xgrammar").compile(guide(3))
    tiny_backend("xgrammar").compile(guide({"whitespace_flexible": True}))


@pytest.mark.parametrize(
    ("pattern", "is_taken"),
    [("a^b", False), ("(a$|b)", False), (r"\Aab", False), (r"^[$^]\^\\\$[^^\]]$", True), (r"\d\w", True)],
)
def test_regexes_that_xgrammar_would_misread_are_refused(pattern: str, is_taken: bool) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    for guide in (
        Guide(GuideKind.REGEX, pattern),
        Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern})),
    ):
        if is_taken:
            tiny_backend("xgrammar").compile(guide)
            continue
        with pytest.raises(InvalidArgument, match="xgrammar does not know"):
            tiny_backend("xgrammar").compile(guide)


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(GuideKind.JSON_SCHEMA, f'{{"type": "integer", "minimum": {2**70}}}'), "in magnitude"),
        (Guide(GuideKind.JSON_SCHEMA, f'{{"anyOf": [{{"const": {{"a": [{-(2**54)}]}}}}]}}'), "in magnitude"),
        (Guide(GuideKind.JSON_SCHEMA, '{"x-guidance": {"item_separator": ";"}}'), "x-guidance"),
    ],
)
def test_guides_that_llguidance_would_misread_are_refused(guide: Guide, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        tiny_backend().compile(guide)
    tags = {
        "structures": [{"begin": "<f>", "schema": json.loads(guide.text), "end": "</f>"}],
        "triggers": ["<f"],
    }
    with pytest.raises(InvalidArgument, match=reason):
        tiny_backend().compile(Guide(GuideKind.STRUCTURAL_TAG, json.dumps(tags)))
    named = '{"properties": {"x-guidance": {"minimum": 9007199254740992, "type": "integer"}}}'
    tiny_backend().compile(Guide(GuideKind.JSON_SCHEMA, named))


def test_a_guide_that_is_too_long_is_refused_without_compiling() -> None:
    with compiling(bounds=GuideBounds(max_bytes=10)) as it:
        it.submit(1, Guide(GuideKind.REGEX, "ü" * 6))
        (event,) = it.compiler.events()
        assert event.error_kind == "INVALID_ARG"
        assert "12 bytes, expected at most 10" in event.error
        assert not children()


def test_a_guide_that_takes_too_long_is_killed_and_the_next_one_compiled() -> None:
    with compiling(bounds=GuideBounds(timeout_s=2.0)) as it:
        it.submit(1, make_bomb())
        (event,) = it.next()
        assert event.error_kind == "INVALID_ARG"
        assert "longer to compile than 2000 ms (guided_decoding_compile_timeout_ms)" in event.error
        assert not children(), "the process was killed"
        it.submit(2, GOOD)
        assert it.next() == (GuideEvent(2),)
        assert len(children()) == 1


def test_a_process_that_dies_fails_only_the_guide_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(LineFormatter("engine"))
    with compiling(bounds=GuideBounds(timeout_s=600)) as it:
        it.submit(1, GOOD)
        assert it.next() == (GuideEvent(1),)
        kill_child()
        it.submit(2, Guide(GuideKind.REGEX, "x"))
        assert it.next() == (GuideEvent(2),), "it had nothing to do: another one was started"
        it.submit(3, make_bomb(), Origin("openai", "id-3"))
        kill_child(is_busy=True)
        (event,) = it.next()
        assert (event.request_id, event.error_kind) == (3, "INVALID_ARG")
        assert "ended with -9" in event.error
        it.submit(4, Guide(GuideKind.REGEX, "y"))
        assert it.next() == (GuideEvent(4),)
    assert "the process that compiles guides ended with -9 request_id=id-3\n" in caplog.text
    assert caplog.text.count("request_id=") == 1


def kill_child(is_busy: bool = False) -> None:
    (child,) = children()
    used = child.cpu_times().user
    while is_busy and child.cpu_times().user < used + 0.05:
        pass
    child.kill()
    if not is_busy:  # its status is left for the compiler, which has not waited for it yet
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_new_guides_go_before_a_slow_one() -> None:
    with compiling(bounds=GuideBounds(timeout_s=4.0)) as it:
        bombs = [replace(make_bomb(), text=f"{make_bomb().text}\n# {n}") for n in range(3)]
        for number, bomb in enumerate(bombs):
            it.submit(number, bomb)
        it.submit(7, GOOD)
        assert it.next() == (GuideEvent(7),), "behind a tenth of the time of each of the others"
        it.compiler.forget(0)
        it.compiler.forget(1)
        (event,) = it.next()
        assert event.request_id == 2 and "longer to compile than 4000 ms" in event.error


def test_guides_without_a_waiting_request_are_not_compiled() -> None:
    """The jobs of cancelled requests are dropped, and their numbers may be used again."""
    grammars = tiny_grammars()
    with compiling(grammars, bounds=GuideBounds(timeout_s=20.0)) as it:
        it.submit(1, make_bomb())
        it.submit(2, Guide(GuideKind.REGEX, "dropped"))
        it.submit(3, Guide(GuideKind.REGEX, "wanted"))
        it.submit(4, Guide(GuideKind.REGEX, "wanted"))
        for number in (1, 2, 3):
            it.compiler.forget(number)
        it.submit(2, Guide(GuideKind.REGEX, "last"))
        # On a busy machine the first of the two may be interrupted for the second.
        assert {*it.next(), *it.next()} == {GuideEvent(4), GuideEvent(2)}
        assert Guide(GuideKind.REGEX, "dropped") not in grammars


def test_a_compiler_process_that_cannot_start_is_reported() -> None:
    with compiling(command=(sys.executable, "-c", "raise SystemExit(3)")) as it:
        it.submit(1, GOOD)
        (event,) = it.next()
        assert event.error_kind == "INTERNAL"
        assert "did not start" in event.error


def test_a_compiler_can_be_closed_while_a_guide_compiles() -> None:
    with compiling(bounds=GuideBounds(timeout_s=600)) as it:
        it.submit(1, make_bomb())


def test_the_library_is_set_up_once_by_the_first_guide() -> None:
    set_up: list[GrammarLibrary] = []

    def make() -> GrammarLibrary:
        set_up.append(GrammarLibrary(tiny_backend(), tiny_vocabulary()))
        return set_up[0]

    with compiling(Grammars(make)) as it:
        assert not set_up
        it.submit(1, GOOD)
        assert it.next() == (GuideEvent(1),)
        it.submit(2, Guide(GuideKind.REGEX, "[a-d]{4}"))
        assert it.next() == (GuideEvent(2),)
    assert len(set_up) == 1


def test_the_library_can_be_set_up_before_the_first_guide() -> None:
    is_set_up = threading.Event()

    def make() -> GrammarLibrary:
        is_set_up.set()
        return GrammarLibrary(tiny_backend(), tiny_vocabulary())

    with compiling(Grammars(make)) as it:
        it.compiler.prepare()
        assert is_set_up.wait(600)
        it.submit(1, GOOD)
        assert it.next() == (GuideEvent(1),)


@pytest.mark.parametrize("error", [Unsupported("no tokenizer"), OSError("no vocabulary")])
def test_guides_are_refused_if_the_library_cannot_be_set_up(error: Exception) -> None:
    num_tries = []

    def fail() -> GrammarLibrary:
        num_tries.append(error)
        raise error

    with compiling(Grammars(fail)) as it:
        it.compiler.prepare()
        for number in (1, 2):
            it.submit(number, GOOD)
            (event,) = it.next()
            assert event.error_kind == ("UNSUPPORTED" if isinstance(error, Unsupported) else "INTERNAL")
            assert str(error) in event.error
    assert len(num_tries) == 1


def test_the_number_of_kept_guides_is_bounded() -> None:
    grammars = grammars_of(tiny_backend(), tiny_vocabulary(), max_guides=2)
    guides = [Guide(GuideKind.REGEX, letter) for letter in "abc"]
    for guide in guides:
        grammars.matcher(guide)
    assert [guide in grammars for guide in guides] == [False, True, True]
    grammars.matcher(guides[0])
    assert [guide in grammars for guide in guides] == [True, False, True]


def test_guides_of_active_requests_are_kept() -> None:
    """A guide is kept until its request starts, however many guides are compiled in between."""
    grammars = grammars_of(tiny_backend(), tiny_vocabulary(), max_guides=2)
    guides = [Guide(GuideKind.REGEX, letter) for letter in "abcdef"]
    with compiling(grammars) as it:
        for number, guide in enumerate(guides):
            it.submit(number, guide)
        events: list[GuideEvent] = []
        while len(events) < len(guides):
            events += it.next()
        assert all(guide in grammars for guide in guides)
        for number in range(len(guides)):
            it.compiler.forget(number)
        assert [guide in grammars for guide in guides] == [False] * 4 + [True] * 2
