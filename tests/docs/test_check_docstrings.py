"""The check of docstrings and their entries refuses relative clauses, and accepts noun phrases and imperatives."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_docstrings.py"))
MODULE = '"""{}"""\n'
CLASS = 'class Batch:\n    """{}"""\n'
ATTRIBUTE = 'SIZE = 1\n"""{}"""\n'
FIELD = 'class Batch:\n    """A batch."""\n\n    size: int = 1\n    """{}"""\n'
ARGUMENT = (
    'def run(size, rows):\n    """Run.\n\n    Args:\n        size: Its size.\n        rows: {}\n    """\n'
)
ENTRY = 'class Batch:\n    """A batch.\n\n    Attributes:\n        size, rows: {}\n    """\n'
FUNCTION = 'class Batch:\n    """A batch."""\n\n    async def run(self):\n        """{}"""\n'


Check = Callable[[str], tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check a module with this text; returns the exit status and the messages."""

    def run(text: str) -> tuple[int, str]:
        (tmp_path / "module.py").write_text(text)
        return PROGRAM["main"]([str(tmp_path)]), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("source", "line"), [(MODULE, 1), (CLASS, 2), (FUNCTION, 5), (ATTRIBUTE, 2), (FIELD, 5)]
)
@pytest.mark.parametrize(
    "docstring",
    [
        "What a batch takes.",
        "Those of the batch.",
        "That request has ended.",
        "Whose rows these are.",
        "Who waits.",
        "Where the cache is.",
        "Which rows are read.",
        "Why it failed.",
        "Of each row its highest logit.",
        "Whether it is beam search.",
        "Whether this is rank 0.",
    ],
)
def test_a_relative_clause_is_refused_with_its_place(check, tmp_path, source, line, docstring):
    status, messages = check(source.format(docstring))
    assert status == 1
    assert f"{tmp_path}/module.py:{line}: {docstring}" in messages


@pytest.mark.parametrize(
    ("source", "line", "name"), [(ARGUMENT, 6, "rows"), (ENTRY, 5, "size, rows")], ids=["args", "attributes"]
)
@pytest.mark.parametrize(
    "description", ["What a batch takes.", "Those of the batch.", "of the rows.", "Why it failed."]
)
def test_a_relative_clause_in_an_entry_is_refused_with_its_place(
    check, tmp_path, source, line, name, description
):
    status, messages = check(source.format(description))
    assert status == 1
    assert f"{tmp_path}/module.py:{line}: {name}: {description}" in messages


@pytest.mark.parametrize("source", [MODULE, CLASS, FUNCTION, ATTRIBUTE, FIELD, ARGUMENT, ENTRY])
@pytest.mark.parametrize(
    "docstring",
    [
        "The blocks of a sequence, which nobody else has.",
        "Return what a batch takes.",
        "Whether the request has ended.",
        "Offsets of the rows.",
        "Whatsapp's format.",
        "[rows, vocab_size] float32.",
    ],
)
def test_a_noun_phrase_or_an_imperative_is_accepted(check, source, docstring):
    status, messages = check(source.format(docstring))
    assert status == 0, messages


@pytest.mark.parametrize("source", [ARGUMENT, ENTRY])
@pytest.mark.parametrize(
    "description", ["Whether it is beam search.", "The rows.\n            those: of a batch."]
)
def test_a_condition_and_a_continued_line_are_accepted_in_an_entry(check, source, description):
    status, messages = check(source.format(description))
    assert status == 0, messages


def test_text_after_a_section_is_not_an_entry(check):
    text = '"""Run.\n\nArgs:\n    size: Its size.\n\nRows: of a batch.\n    those: of a batch.\n"""\n'
    status, messages = check(text)
    assert status == 0, messages


def test_code_without_docstrings_is_accepted(check):
    status, messages = check('def run():\n    text = "What a batch takes."\n    return text\n')
    assert status == 0, messages


def test_a_further_line_of_an_entry_that_is_not_indented_is_refused(check, tmp_path):
    whole = ARGUMENT.format("Number of rows, which is larger than\n            the size.")
    assert check(whole)[0] == 0
    status, messages = check(whole.replace("            the size", "        the size"))
    assert (status, messages.splitlines()[0]) == (1, f"{tmp_path}/module.py:7: the size.")
