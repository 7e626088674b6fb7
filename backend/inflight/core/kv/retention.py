"""How long KV blocks are worth keeping once nobody holds them: TensorRT-LLM's `KvCacheRetentionConfig`.

Cached blocks are evicted by priority, lowest first, and within a priority the least recently used first. A request
may give ranges of its prompt, and what it generates, a priority of their own, for a time or for good. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from inflight.errors import InvalidArgument, Name

DEFAULT_PRIORITY = 35
"""The priority of a block that no request said anything about; TensorRT-LLM's default."""

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's wish for how long one block is kept.

    Attributes:
        priority: 0 .. 100; lower ones are evicted first.
        duration_ms: Milliseconds from the moment nobody holds the block until its priority falls back to
            DEFAULT_PRIORITY; None: it never does.
    """

    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRangeRetention:
    """The retention of the prompt's tokens [token_start, token_end); no end means the end of the prompt."""

    token_start: int
    token_end: int | None
    retention: Retention


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """A request's wishes for how long its blocks are kept. Tensors `retention_*`.

    Attributes:
        ranges: Ranges of the prompt, which must not overlap; sorted by their starts when this is made.
        decode: The retention of blocks whose first token is a generated one.
    """

    ranges: tuple[TokenRangeRetention, ...] = ()
    decode: Retention | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=_start_of)))

    def of_block(self, first_token: int, prompt_length: int) -> Retention | None:
        """Retention of the block that begins at position `first_token`; None: the block keeps the one it has."""
        if first_token >= prompt_length:
            return self.decode
        place = bisect_right(self.ranges, first_token, key=_start_of)
        if not place:
            return None
        part = self.ranges[place - 1]
        return part.retention if part.token_end is None or first_token < part.token_end else None

    def validate(self) -> None:
        """Raise InvalidArgument that names the tensor, what came and what was expected."""
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
