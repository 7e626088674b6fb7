"""The interface of the translation, for the modules that translate particular keywords."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from inflight.guided.schemas.documents import Document, Node, refused, shown
from inflight.guided.schemas.overlap import LARGEST, Overlaps
from inflight.guided.schemas.patterns import UnreadablePattern, rust_patterns
from inflight.json_values import is_list

Written = dict[str, Any] | bool
"""A translated schema."""


class SchemaWriter(ABC):
    """Translates the schemas of one document, and reads the values of their keywords.

    Attributes:
        document: The document being read.
        overlaps: Compares the document's schemas.
        definitions: Translated targets of references, by their new names.
        negating: Targets of references whose negation is being written.
        latest: The schema whose translation was begun last.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.overlaps = Overlaps(document)
        self.definitions: dict[str, Written] = {}
        self.negating: set[tuple[str, str]] = set()
        self.latest = document.root

    @abstractmethod
    def write(self, node: Node) -> Written:
        """Return the translation of a schema."""

    @abstractmethod
    def listed(self, node: Node) -> list[Any] | None:
        """Return the distinct values that a schema allows; None if it does not list them."""

    def number(self, node: Node, words: Mapping[str, Any], keyword: str) -> int | float | None:
        """Return a numeric keyword; None if absent."""
        value = words.get(keyword)
        if value is None and keyword not in words:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (math.inf, -math.inf):
            raise refused(node.path, f"{keyword} is {shown(value)}, expected a number")
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def count(self, node: Node, words: Mapping[str, Any], keyword: str) -> int | None:
        """Return a keyword that is a count; None if absent."""
        value = self.number(node, words, keyword)
        if value is not None and (not isinstance(value, int) or not 0 <= value <= LARGEST):
            raise refused(
                node.path,
                f"{keyword} is {shown(value)}, expected an integer of at least 0 and at most {LARGEST}",
            )
        return value

    def pattern(self, node: Node, expression: Any, keyword: str) -> str:
        """Return the schema's regular expression as a single Rust expression."""
        found = self.patterns(node, expression, keyword)
        if len(found) > 1:
            raise refused(
                node.path, f"{keyword} {shown(expression)} has a look-ahead, which cannot be followed here"
            )
        return found[0]

    def patterns(self, node: Node, expression: Any, keyword: str) -> list[str]:
        """Return the schema's regular expression as Rust expressions that must all match."""
        if not isinstance(expression, str):
            raise refused(node.path, f"{keyword} is {shown(expression)}, expected a text")
        try:
            return rust_patterns(expression)
        except UnreadablePattern as error:
            raise refused(node.path, f"{keyword} {shown(expression)} {error}") from None

    def parts(self, node: Node, words: Mapping[str, Any], keyword: str) -> list[Node]:
        """Return the schemas in a keyword's list."""
        value = words.get(keyword, [])
        if not is_list(value) or (keyword in words and not value and keyword != "prefixItems"):
            raise refused(node.path, f"{keyword} is {shown(value)}, expected schemas in an array")
        return [node.inside(each, keyword, index) for index, each in enumerate(value)]
