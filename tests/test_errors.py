"""An error keeps the names of inputs apart from its text, also between processes."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest

import inflight
from inflight import errors
from inflight.errors import (
    ERROR_CODES,
    ERROR_KINDS,
    InvalidArgument,
    Name,
    StepFailed,
    TooLong,
    error_from_kind,
    error_from_plain,
    error_to_plain,
    joined,
)
from inflight.tensors.input_table import INPUTS

PACKAGE = Path(inflight.__file__).parent
KINDS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.RequestError) and each is not errors.RequestError
]


def test_the_text_of_an_error_has_the_protocols_names_of_inputs() -> None:
    error = InvalidArgument(Name("end_id"), " must be below ", Name("x"), ", got {12}")
    assert str(error) == "end_id must be below x, got {12}"
    assert error.names == ("end_id", "x")
    shown = error.with_names({"end_id": "stop_token_ids", "x": "x"}.__getitem__)
    assert (type(shown), str(shown)) == (InvalidArgument, "stop_token_ids must be below x, got {12}")
    assert shown.names == ("stop_token_ids", "x")


def test_a_name_inside_plain_text_is_unchanged() -> None:
    error = InvalidArgument(Name("end_id"), " is wrong: 'end_id'")
    assert str(error.with_names(str.upper)) == "END_ID is wrong: 'end_id'"


def test_a_name_may_be_a_path() -> None:
    assert [Name(path).root for path in ("a", "a.b", "a[0].b", "a[0]")] == ["a"] * 4


def test_an_error_is_unchanged_when_sent_to_another_process() -> None:
    chance = random.Random(1)
    for _ in range(500):
        parts = [
            Name(chance.choice(["end_id", "messages[0].content"]))
            if chance.random() < 0.4
            else "".join(chance.choice("{}ab: !\"'\n€") for _ in range(chance.randint(1, 6)))
            for _ in range(chance.randint(0, 5))
        ]
        error = chance.choice(KINDS)(*parts)
        for back in (
            error_from_kind(error.kind, error.marked),
            error_from_plain(TooLong, error_to_plain(error)),
        ):
            assert (str(back), back.names, back.code) == (str(error), error.names, error.code)
            assert back.marked == error.marked and isinstance(error, type(back))


def test_each_kind_has_its_class_and_its_code() -> None:
    assert set(ERROR_KINDS) == {*ERROR_CODES, "TOO_LONG", "BAD_ADAPTER", "QUEUE_FULL"}
    for kind in ERROR_KINDS:
        assert error_from_kind(kind, "").kind == kind
    assert type(error_from_kind("NEW", "why")) is StepFailed


@pytest.mark.parametrize("marked", ["{", "a } b", "{a:b}", "{a!r}"])
def test_a_text_with_invalid_marks_of_names_raises_value_error(marked: str) -> None:
    with pytest.raises(ValueError):
        error_from_kind("INVALID_ARG", marked)


def test_joined_names_stay_names() -> None:
    assert joined(["a", "b", "c"], ", ") == ["a", ", ", "b", ", ", "c"] and joined([], ", ") == []
    assert [isinstance(part, Name) for part in joined(["a", "b"], " and ")] == [True, False, True]


def test_no_error_has_the_name_of_an_input_in_its_text() -> None:
    """Protocols could not replace such a name. Adapters' errors repeat texts of TensorRT-LLM."""
    names = "|".join(spec.name for spec in INPUTS.specs if "_" in spec.name)
    named = re.compile(rf"(?<![\w.])({names})\b")
    classes = {each.__name__ for each in KINDS}
    found: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in classes:
                texts = [part for part in call.args if isinstance(part, ast.Constant | ast.JoinedStr)]
                found += [
                    f"{path.relative_to(PACKAGE)}: {each.value}"
                    for text in texts
                    for each in ast.walk(text)
                    if isinstance(each, ast.Constant) and named.search(str(each.value))
                ]
    assert [each for each in found if not each.startswith("adapters/")] == []
    assert found, "it finds those of adapters"
