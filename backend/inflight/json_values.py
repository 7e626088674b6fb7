"""Types of values parsed from JSON, and type checks for them. Imports only the standard library."""

from __future__ import annotations

from typing import Any, TypeGuard

Json = dict[str, Any]
"""A JSON object."""
MAX_NUMBER = 10**15
"""More than any size or factor of a model, and so small that products of two numbers can be integers."""


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is an array."""
    return isinstance(value, list)


def positive_int(value: Any) -> int | None:
    """Return an integer of at least 1 as it is, and None for any other value."""
    return value if type(value) is int and value > 0 else None
