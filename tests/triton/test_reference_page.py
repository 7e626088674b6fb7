"""docs/requests.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

from inflight.triton.reference_page import fill_in

PAGE = Path(__file__).parents[2] / "docs" / "requests.md"


def test_the_page_is_what_the_tables_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == fill_in(text), "run scripts/write_configs"


def test_what_stands_around_the_tables_stays() -> None:
    filled = fill_in("before\n<!-- tables: begin -->what it said before<!-- tables: end -->\nafter\n")
    assert filled.startswith("before\n") and filled.endswith("\nafter\n") and "said before" not in filled
