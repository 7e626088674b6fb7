"""Parameters and examples of tests: some run by default, and all with `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

_chosen = "fast"


def choose(config: pytest.Config) -> None:
    """Select the tier by the command line, before test files are imported."""
    global _chosen
    _chosen = "all" if config.getoption("--all") else "fast"


def examples(fast: int, all: int) -> int:
    """Return the number of examples of a hypothesis test, or seeds of a loop, in the selected tier."""
    return all if _chosen == "all" else fast


def with_all(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Mark the `values` exhaustive that are not in `fast`.

    Args:
        values: Values for `pytest.mark.parametrize`: single values, tuples or `pytest.param`.
        fast: Values that run by default; a tuple may be given by its first element.
    """
    params = [_as_param(value) for value in values]
    missing = [each for each in fast if not any(_is_one_of(param, [each]) for param in params)]
    assert not missing, f"{missing} are no parameters"
    return params if _chosen == "all" else [param for param in params if _is_one_of(param, fast)]


def _as_param(value: Any) -> Any:
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def _is_one_of(param: Any, fast: Collection[Any]) -> bool:
    whole = param.values if len(param.values) > 1 else param.values[0]
    return any(each == whole or each == param.values[0] for each in fast)
