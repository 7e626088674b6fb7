"""The white space between the tokens of JSON that a guide allows, as the keyword `x-guidance` of a schema says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from inflight.guided.schemas.documents import refused, shown
from inflight.guided.schemas.patterns import UnreadablePattern, rust_pattern
from inflight.json_values import is_object

MOST_SPACES = 20
"""White space characters at one place, where nothing else is asked for: a model at a loss writes ever more."""
KEYWORD = "x-guidance"


@dataclass(frozen=True, slots=True)
class Spaces:
    """The white space that is allowed at one place.

    Attributes:
        is_flexible: Whether there may be any.
        pattern: What it looks like, as a regular expression of Rust; "" for the default.
    """

    is_flexible: bool = True
    pattern: str = ""

    def options(self) -> dict[str, Any]:
        """As llguidance reads it."""
        if not self.is_flexible:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.pattern or f"[ \\t\\n\\r]{{1,{MOST_SPACES}}}"}


def read_spaces(schema: Any, root: str) -> Spaces:
    """The white space that a whole schema asks for. Raises InvalidArgument for anything else."""
    given: Any = cast(Mapping[str, Any], schema).get(KEYWORD) if is_object(schema) else None
    if given is None:
        return Spaces()
    path = f"{root}/{KEYWORD}"
    if not is_object(given) or given.keys() - {"whitespace_pattern", "whitespace_flexible"}:
        raise refused(
            path,
            f"{KEYWORD} is {shown(given)}, expected an object with whitespace_pattern or whitespace_flexible",
        )
    flexible = given.get("whitespace_flexible", True)
    if not isinstance(flexible, bool):
        raise refused(path, f"whitespace_flexible is {shown(flexible)}, expected true or false")
    pattern = given.get("whitespace_pattern", "")
    flexible = flexible and given.get("whitespace_pattern") != ""
    try:
        is_space = isinstance(pattern, str) and _is_space(pattern)
        written = rust_pattern(pattern) if is_space else ""
    except UnreadablePattern:
        is_space, written = False, ""
    if not is_space:
        raise refused(
            path,
            f"whitespace_pattern is {shown(pattern)}, expected a regular expression of white space, such as "
            "[ \\n]{0,8}",
        )
    return Spaces(flexible, written)


def _is_space(pattern: str) -> bool:
    """Whether an expression matches nothing but blanks, tabs and line ends: it is taken apart until it is gone."""
    left = re.sub(r"\\[tnr]|\\x(?:20|0[9aAdD])|\\u00(?:20|0[9aAdD])|\\s|[ \t\n\r]", "s", pattern)
    if "\\s" in pattern:  # vertical tabs are no white space of JSON
        return False
    left = re.sub(r"\[s+\]", "s", left)
    for _ in range(len(pattern)):
        shorter = re.sub(r"s(?:[*+?]|\{\d+(?:,\d*)?\})\??", "s", left)
        shorter = re.sub(r"\((?:\?:)?(?:s|\|)*\)", "s", shorter)
        shorter = re.sub(r"ss+", "s", shorter)
        if shorter == left:
            break
        left = shorter
    return not left.replace("s", "").replace("|", "")
