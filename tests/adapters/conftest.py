from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.adapters.caching import Caching
from tests.models.conftest import zoo  # noqa: F401 - one fixture for both folders


@pytest.fixture
def make() -> Iterator[Callable[[int], Caching]]:
    made: list[Caching] = []

    def make(max_units: int = 10) -> Caching:
        made.append(Caching(max_units))
        return made[-1]

    yield make
    for each in made:
        each.folders.gate.set()
        each.cache.close()
        each.cache.close()
