"""How long unreferenced KV blocks are worth keeping: TensorRT-LLM's `KvCacheRetentionConfig`.

Cached blocks are evicted by priority, lowest first, and within a priority least recently used first. A request may
set a priority for ranges of its prompt and for its generated tokens, for a limited time or for ever. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from inflight.errors import InvalidArgument, Name

DEFAULT_PRIORITY = 35
"""The priority of a block for which no request set one; TensorRT-LLM's default."""

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention that a request sets for one block.

    Attributes:
        priority: 0 .. 100; blocks of lower priority are evicted first.
        duration_ms: Milliseconds from the release of the block until its priority falls back to DEFAULT_PRIORITY;
            None: it never does.
    """

    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRangeRetention:
    """The retention of prompt tokens [token_start, token_end); a None end means the end of the prompt."""

    token_start: int
    token_end: int | None
    retention: Retention


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """The retentions that a request sets for its blocks. Tensors `retention_*`.

    Attributes:
        ranges: Ranges of the prompt, which must not overlap; kept sorted by their starts.
        decode: The retention of blocks whose first token is a generated one.
    """

    ranges: tuple[TokenRangeRetention, ...] = ()
    decode: Retention | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=_start_of)))

    def of_block(self, first_token: int, prompt_length: int) -> Retention | None:
        """Return the retention of the block starting at position `first_token`; None: the request sets none."""
        if first_token >= prompt_length:
            return self.decode
        place = bisect_right(self.ranges, first_token, key=_start_of)
        if not place:
            return None
        part = self.ranges[place - 1]
        return part.retention if part.token_end is None or first_token < part.token_end else None

    def validate(self) -> None:
        """Raise InvalidArgument with the tensor, its value and the expected values if a retention is not valid."""
        for part in self.ranges:
            _check_retention(part.retention, "retention_token_range", "priorities", "durations_ms")
            if part.token_start < 0:
                raise InvalidArgument(
                    Name("retention_token_range_starts"), f" must be >= 0, got {part.token_start}"
                )
            if part.token_end is not None and part.token_end <= part.token_start:
                raise InvalidArgument(
                    Name("retention_token_range_ends"),
                    " must be greater than their starts (-1: the prompt's end), "
                    f"got [{part.token_start}, {part.token_end})",
                )
        for before, after in pairwise(self.ranges):
            if before.token_end is None or before.token_end > after.token_start:
                end = -1 if before.token_end is None else before.token_end
                raise InvalidArgument(
                    f"retention token ranges must not overlap, got [{before.token_start}, {end}) and one that "
                    f"starts at {after.token_start}"
                )
        if self.decode is not None:
            _check_retention(self.decode, "retention_decode", "priority", "duration_ms")


def _start_of(part: TokenRangeRetention) -> int:
    return part.token_start


def _check_retention(retention: Retention, name: str, priority: str, duration: str) -> None:
    if not 0 <= retention.priority <= MAX_PRIORITY:
        raise InvalidArgument(
            Name(f"{name}_{priority}"), f" must be in [0, {MAX_PRIORITY}], got {retention.priority}"
        )
    if retention.duration_ms is not None and retention.duration_ms < 1:
        raise InvalidArgument(
            Name(f"{name}_{duration}"), f" must be >= 1 (-1: for ever), got {retention.duration_ms}"
        )
