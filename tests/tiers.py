"""Parameters and examples of a test of which some run by default, and all with `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

_chosen = "fast"


def choose(config: pytest.Config) -> None:
    """Take the tier that the command line asks for, before test files are imported."""
    global _chosen
    _chosen = "all" if config.getoption("--all") else "fast"


def examples(fast: int, all: int) -> int:
    """How many examples of a hypothesis test, or seeds of a loop, the chosen tier has."""
    return all if _chosen == "all" else fast


def with_all(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Mark those `values` exhaustive that are not in `fast`.

    Args:
        values: Of `pytest.mark.parametrize`: single values, tuples or `pytest.param`.
        fast: Values that run by default; of a tuple, its first element may stand for it.
    """
    params = [_as_param(value) for value in values]
    missing = [each for each in fast if not any(_is_one_of(param, [each]) for param in params)]
    assert not missing, f"{missing} are no parameters"
    return [param if _is_one_of(param, fast) else _exhaustive(param) for param in params]


def _as_param(value: Any) -> Any:
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def _is_one_of(param: Any, fast: Collection[Any]) -> bool:
    whole = param.values if len(param.values) > 1 else param.values[0]
    return any(each == whole or each == param.values[0] for each in fast)


def _exhaustive(param: Any) -> Any:
    return pytest.param(*param.values, marks=[*param.marks, pytest.mark.exhaustive], id=param.id)
