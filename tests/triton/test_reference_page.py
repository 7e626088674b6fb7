"""docs/tensors.md matches the tables."""

from __future__ import annotations

import re
from pathlib import Path

from inflight.triton.reference_pages import fill_in, tensor_tables

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_the_tensors_page_matches_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == fill_in(text, tensor_tables()), "run scripts/write_configs"


def test_rewriting_the_tables_keeps_the_text_around_them() -> None:
    filled = fill_in("before\n<!-- tables: begin -->what it said before<!-- tables: end -->\nafter\n", "new")
    assert filled.startswith("before\n") and filled.endswith("\nafter\n") and "said before" not in filled


def test_the_tests_named_on_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        assert f"def {name}(" in (PAGE.parents[1] / path).read_text(encoding="utf-8"), f"{path}::{name}"
