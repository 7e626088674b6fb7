"""The check of docstrings refuses relative clauses, and accepts noun phrases and imperatives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "check_docstrings.py"
MODULE = '"""{}"""\n'
CLASS = 'class Batch:\n    """{}"""\n'
FUNCTION = 'class Batch:\n    """A batch."""\n\n    async def run(self):\n        """{}"""\n'


def check(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "module.py").write_text(text)
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(("source", "line"), [(MODULE, 1), (CLASS, 2), (FUNCTION, 5)])
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
def test_a_relative_clause_is_refused_with_its_place(tmp_path, source, line, docstring):
    done = check(tmp_path, source.format(docstring))
    assert done.returncode == 1
    assert f"{tmp_path}/module.py:{line}: {docstring}" in done.stderr


@pytest.mark.parametrize("source", [MODULE, CLASS, FUNCTION])
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
def test_a_noun_phrase_or_an_imperative_is_accepted(tmp_path, source, docstring):
    done = check(tmp_path, source.format(docstring))
    assert done.returncode == 0, done.stderr


def test_code_without_docstrings_is_accepted(tmp_path):
    done = check(tmp_path, 'def run():\n    text = "What a batch takes."\n    return text\n')
    assert done.returncode == 0, done.stderr
