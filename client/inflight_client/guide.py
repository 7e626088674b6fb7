"""Guides (guided decoding): formats to which generated text can be constrained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")


@dataclass(frozen=True)
class Guide:
    """A guide for `generate` and `stream`; see docs/guided-decoding.md for the types.

    Attributes:
        type: One of GUIDE_TYPES.
        text: The schema, expression, grammar or tags; "" for json.

    Raises:
        ValueError: The type is unknown, or the guide is no text.
    """

    type: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.type not in GUIDE_TYPES:
            raise ValueError(f"a guide's type must be one of {', '.join(GUIDE_TYPES)}, got {self.type!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"a guide must be a text, got {self.text!r:.200}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Guide:
        """Return a guide for text that is JSON and valid according to a JSON schema."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
