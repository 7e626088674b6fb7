"""The kinds of requests: most generate text, others stop a request, ask for the state or manage adapters."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from inflight.tensors.reader import TensorReader


class RequestKind(Enum):
    """The kind of a request.

    If it is not GENERATE, all tensors are ignored except the one that determines the kind.
    """

    GENERATE = "tokens for its prompts"
    STOP = "the end of another request"
    STATE = "the batcher's state"
    ADAPTERS = "to list, load or unload adapters"


def request_kind(rows: Sequence[TensorReader]) -> RequestKind:
    """Return STOP, STATE or ADAPTERS if any row has the tensor of that kind, else GENERATE."""
    if any(row.boolean("stop") for row in rows):
        return RequestKind.STOP
    if any(row.boolean("state") for row in rows):
        return RequestKind.STATE
    if any(any(row.text_sizes("lora_command")) for row in rows):
        return RequestKind.ADAPTERS
    return RequestKind.GENERATE
