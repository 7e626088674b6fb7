"""Picture spans: consecutive virtual tokens of a prompt, in models with bidirectional attention among them.

In such a model each token of a span attends to the whole span, also to later tokens. So a span's tokens must all
be in one chunk, or be reused from sequences with the same span. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Spans = tuple[tuple[int, int], ...]
"""Spans in order, each as the positions of its first token and after its last token."""


def find_spans(token_ids: Sequence[int], vocab_size: int) -> Spans:
    """Return the longest runs of consecutive ids >= `vocab_size`."""
    spans: list[tuple[int, int]] = []
    for position, token_id in enumerate(token_ids):
        if token_id < vocab_size:
            continue
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return tuple(spans)


def span_at(spans: Spans, position: int) -> tuple[int, int] | None:
    """Return the span that a cut before `position` divides; None if there is none."""
    index = bisect_left(spans, position, key=lambda span: span[1])
    if index < len(spans) and spans[index][0] < position < spans[index][1]:
        return spans[index]
    return None
