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


WITH_PROMISES = (
    "README.md", "docs/batches.md", "docs/engine.md", "docs/from-vllm.md", "docs/guided-decoding.md",
    "docs/openai-server.md", "docs/operating.md", "docs/ranks.md", "docs/receipts.md", "docs/saved-kv-blocks.md",
    "docs/security.md", "docs/speculation.md", "docs/tensors.md", "docs/triton.md",
)  # fmt: skip
"""Pages that promise something to clients or operators."""


@pytest.mark.parametrize("page", WITH_PROMISES)
def test_a_page_that_promises_something_links_to_the_promise(page: str) -> None:
    sections = {
        "#" + re.sub(r"\W+", "-", title.lower()).strip("-") for title in re.findall(r"^## (.+)$", PAGE, re.M)
    }
    links = re.findall(r"promises\.md(#[\w-]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert links and set(links) <= sections, (links, sections)
