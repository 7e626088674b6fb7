"""The tensors of one prompt that say which KV blocks it may share and how long its own are worth keeping.

Owns which of them belong together. Does not check ranges: Request.validate does. Runs on the thread that calls
execute.
"""

from __future__ import annotations

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import DEFAULT_PRIORITY, Retention, RetentionConfig, TokenRangeRetention
from inflight.errors import InvalidArgument
from inflight.triton.tensor_reader import TensorReader

_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"
_OPEN_ENDED = -1
"""Of an end: the prompt's. Of a duration: for ever."""


def read_identity(reader: TensorReader) -> PrefixIdentity:
    """What the prompt's KV blocks depend on besides its tokens."""
    return PrefixIdentity(cache_salt_id=reader.integer("cache_salt_id") or 0)


def read_retention(reader: TensorReader) -> RetentionConfig:
    """What is said about the prompt's blocks; nothing where no tensor says anything.

    Raises InvalidArgument if a range lacks a part; the message names the tensors and their lengths.
    """
    return RetentionConfig(_ranges(reader), _decode(reader))


def _ranges(reader: TensorReader) -> tuple[TokenRangeRetention, ...]:
    starts = _integers(reader, _STARTS)
    if starts is None:
        for name in (_ENDS, _PRIORITIES, _DURATIONS):
            if _integers(reader, name) is not None:
                raise InvalidArgument(f"{_STARTS} must be provided: {name} came without it")
        return ()
    ends = _beside(reader, _ENDS, len(starts))
    priorities = _beside(reader, _PRIORITIES, len(starts))
    has_durations = _integers(reader, _DURATIONS) is not None
    durations = _beside(reader, _DURATIONS, len(starts)) if has_durations else [_OPEN_ENDED] * len(starts)
    return tuple(
        TokenRangeRetention(start, _bounded(end), Retention(priority, _bounded(duration)))
        for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
    )


def _decode(reader: TensorReader) -> Retention | None:
    priority = reader.integer("retention_decode_priority")
    duration = reader.integer("retention_decode_duration_ms")
    if priority is None and duration is None:
        return None
    return Retention(DEFAULT_PRIORITY if priority is None else priority, _bounded(duration))


def _beside(reader: TensorReader, name: str, length: int) -> list[int]:
    """One number for each range."""
    values = _integers(reader, name)
    if values is None:
        raise InvalidArgument(f"{name} must be provided: {_STARTS} has {length} ranges")
    if len(values) != length:
        raise InvalidArgument(
            f"Invalid {name} length. Expected length {length}, as {_STARTS} has, got length {len(values)}"
        )
    return values


def _integers(reader: TensorReader, name: str) -> list[int] | None:
    array = reader.array(name)
    return None if array is None else array.tolist()


def _bounded(value: int | None) -> int | None:
    return None if value == _OPEN_ENDED else value
