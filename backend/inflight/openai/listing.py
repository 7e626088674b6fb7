"""Lists in OpenAI's form, in pages that a query selects by `after` and `limit`. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from inflight.openai.errors import invalid

_T = TypeVar("_T")


def is_ascending(query: Mapping[str, str]) -> bool:
    """Return whether a query asks for the oldest first; raise ApiError if its `order` is neither asc nor desc."""
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", f"order is {order[:80]!r}, expected asc or desc")
    return order == "asc"


def page_of(
    items: Sequence[tuple[str, _T]], query: Mapping[str, str], default_limit: int, max_limit: int
) -> dict[str, object]:
    """Return the list object with the page that a query selects.

    Args:
        items: Id and JSON value of every item, in the order of the list.
        query: Parameters of the request: `limit`, and `after`, the id before the page.
        default_limit: Number of items of a page if the query has no `limit`.
        max_limit: Largest `limit`.

    Raises:
        ApiError: A parameter is invalid.
    """
    limit = query.get("limit", str(default_limit))
    if not (limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= max_limit):
        raise invalid("limit", f"limit is {limit[:80]!r}, expected a number from 1 to {max_limit}")
    ids = [item_id for item_id, _ in items]
    start = 0
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise invalid("after", f"after is {after[:80]!r}, expected the id of one of the items")
        start = ids.index(after) + 1
    end = start + int(limit)
    return {
        "object": "list",
        "data": [item for _, item in items[start:end]],
        "first_id": ids[start] if start < len(ids) else None,
        "last_id": ids[start:end][-1] if start < len(ids) else None,
        "has_more": end < len(ids),
    }
