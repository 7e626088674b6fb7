"""By default only smoke tests of the benchmarks run; `scripts/test --all` runs the other tests here."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.exhaustive)
