"""A smoke test for each benchmark by default; what else is here runs with `scripts/test --all`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.exhaustive)
