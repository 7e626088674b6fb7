"""Type checks of values parsed from JSON, so that a type checker knows what is in them. Standard library only."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is an array."""
    return isinstance(value, list)
