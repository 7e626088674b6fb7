"""How the text of a config.pbtxt parameter becomes a value.

Owns the grammar of booleans, numbers, choices and lists. Does not know any key. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of parameter: what to write, and a parser that raises ValueError for anything else."""

    expected: str
    parse: Callable[[str], Any]


def _parse_boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError(text)


BOOLEAN = Kind("true or false", _parse_boolean)
TEXT = Kind("text", str)


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """An integer in [minimum, maximum]."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    bounds = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(f"an integer {bounds}", parse)


def real(minimum: float, maximum: float = math.inf, above: bool = False) -> Kind:
    """A number in [minimum, maximum], or ]minimum, maximum] if it has to be above the minimum."""

    def parse(text: str) -> float:
        value = float(text)
        if not (minimum <= value <= maximum) or (above and value == minimum) or math.isinf(value):
            raise ValueError(text)
        return value

    low = f"{'>' if above else '>='} {minimum:g}"
    return Kind(f"a number {low}" + ("" if math.isinf(maximum) else f" and <= {maximum:g}"), parse)


def choice(*names: str, any_case: bool = False) -> Kind:
    """One of these names, letter for letter, or with `any_case` in small letters or capitals."""

    def parse(text: str) -> str:
        for name in names:
            if text == name or (any_case and text.lower() == name.lower()):
                return name
        raise ValueError(text)

    return Kind(" or ".join(names), parse)


def member(enum: type[Enum], *but: Enum) -> Kind:
    """The value of one of an Enum's members, `but` these."""
    members = {item.value: item for item in enum if item not in but}

    def parse(text: str) -> Enum:
        if text not in members:
            raise ValueError(text)
        return members[text]

    return Kind(" or ".join(members), parse)


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError(text)
    return names


def _integers(expected: str, minimum: int) -> Kind:
    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if min(values) < minimum:
            raise ValueError(text)
        return values

    return Kind(expected, parse)


TOKEN_IDS = _integers("token ids >= 0 with commas between", 0)
WINDOWS = _integers("integers >= 1 with commas between", 1)
DEVICES = _integers("numbers >= 0 with commas between", 0)
NAMES = Kind("names with commas between", _parse_names)
