"""The page of clients has those that are tested, with their versions."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.clients import CLIENTS

PAGE = Path(__file__).parents[2] / "docs/clients.md"


def test_the_page_has_the_tested_versions() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in row.strip("|").split("|"))[:2] for row in rows[2:]]
    assert cells == [(client.name, client.version) for client in CLIENTS]
