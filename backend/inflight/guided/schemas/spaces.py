"""The white space that a guide allows between JSON tokens, as set by the keyword `x-guidance` of a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from inflight.guided.schemas.documents import refused, shown
from inflight.guided.schemas.patterns import UnreadablePattern, rust_pattern
from inflight.json_values import is_object

MAX_SPACES = 20
"""Default of the maximum number of white space characters at one place. A model could otherwise write them
endlessly."""
KEYWORD = "x-guidance"


@dataclass(frozen=True, slots=True)
class Spaces:
    """The white space allowed at one place.

    Attributes:
        is_flexible: Whether white space is allowed.
        pattern: A Rust regular expression for the white space; "": the default.
    """

    is_flexible: bool = True
    pattern: str = ""

    def options(self) -> dict[str, Any]:
        """Return llguidance's options for this white space."""
        if not self.is_flexible:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.pattern or f"[ \\t\\n\\r]{{1,{MAX_SPACES}}}"}


def read_spaces(schema: Any, root: str) -> Spaces:
    """Read the keyword `x-guidance` of a whole schema. Raises InvalidArgument if it is invalid."""
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
    """Return whether an expression matches only blanks, tabs and line ends."""
    left = re.sub(r"\\[tnr]|\\x(?:20|0[9aAdD])|\\u00(?:20|0[9aAdD])|\\s|[ \t\n\r]", "s", pattern)
    if "\\s" in pattern:  # a vertical tab is not JSON white space
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
