"""Read the tensors that control sharing and retention of one prompt's KV blocks."""

from __future__ import annotations

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import DEFAULT_PRIORITY, Retention, RetentionConfig, TokenRangeRetention
from inflight.errors import InvalidArgument, Name
from inflight.tensors.reader import TensorReader

_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"
_OPEN_ENDED = -1  # as an end: the prompt's end; as a duration: unlimited


def read_identity(reader: TensorReader) -> PrefixIdentity:
    """Return the cache salt: KV blocks are shared only among prompts with equal salts."""
    return PrefixIdentity(cache_salt_id=reader.integer("cache_salt_id") or 0)


def read_retention(reader: TensorReader) -> RetentionConfig:
    """Return how long the prompt's KV blocks are retained; the defaults if no tensor is given.

    Raises InvalidArgument if the tensors describe different numbers of ranges; the message names the tensors
    and their lengths.
    """
    return RetentionConfig(_retention_ranges(reader), _decode_retention(reader))


def _retention_ranges(reader: TensorReader) -> tuple[TokenRangeRetention, ...]:
    starts = reader.integers(_STARTS)
    if starts is None:
        for name in (_ENDS, _PRIORITIES, _DURATIONS):
            if reader.integers(name) is not None:
                raise InvalidArgument(Name(_STARTS), " must be provided: ", Name(name), " came without it")
        return ()
    ends = _beside(reader, _ENDS, len(starts))
    priorities = _beside(reader, _PRIORITIES, len(starts))
    has_durations = reader.integers(_DURATIONS) is not None
    durations = _beside(reader, _DURATIONS, len(starts)) if has_durations else [_OPEN_ENDED] * len(starts)
    return tuple(
        TokenRangeRetention(start, _none_if_open(end), Retention(priority, _none_if_open(duration)))
        for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
    )


def _decode_retention(reader: TensorReader) -> Retention | None:
    priority = reader.integer("retention_decode_priority")
    duration = reader.integer("retention_decode_duration_ms")
    if priority is None and duration is None:
        return None
    return Retention(DEFAULT_PRIORITY if priority is None else priority, _none_if_open(duration))


def _beside(reader: TensorReader, name: str, length: int) -> list[int]:
    """Return the numbers of the tensor `name`.

    Raises InvalidArgument unless there is one for each of `length` ranges.
    """
    values = reader.integers(name)
    if values is None:
        raise InvalidArgument(Name(name), " must be provided: ", Name(_STARTS), f" has {length} ranges")
    if len(values) != length:
        raise InvalidArgument(
            "Invalid ",
            Name(name),
            f" length. Expected length {length}, as ",
            Name(_STARTS),
            f" has, got length {len(values)}",
        )
    return values


def _none_if_open(value: int | None) -> int | None:
    return None if value == _OPEN_ENDED else value
