"""docs/promises.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([\w/]+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", NAMES)
def test_a_test_that_breaks_a_promise_exists(name: str) -> None:
    path, _, function = name.partition("::")
    file = ROOT / "tests" / path
    assert file.is_file(), name
    tests = {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert not function or function in tests, name


def test_every_promise_names_a_test() -> None:
    promises = [row for row in PAGE.splitlines() if row.startswith("| **")]
    assert len(promises) > 15
    assert [row for row in promises if ".py" not in row] == []
