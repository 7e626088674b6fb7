"""What the parts of a tokenizer are, by the `tokenizers` library's own description of them. Pure; any thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Component = dict[str, Any]


def described(component: Any, key: str) -> list[Component]:
    """A normalizer, pre-tokenizer or decoder as tokenizer.json writes it, with sequences flattened.

    Args:
        component: Of the `tokenizers` library; None, where a tokenizer has none, is an empty list.
        key: What a sequence calls its parts: normalizers, pretokenizers or decoders.
    """

    def flatten(part: Component) -> Iterator[Component]:
        if part["type"] != "Sequence":
            yield part
            return
        for inner in part[key]:
            yield from flatten(inner)

    return [] if component is None else list(flatten(json.loads(component.__getstate__())))
