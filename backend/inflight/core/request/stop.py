"""Why generation ended, and the signals that end it from outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class FinishReason(IntEnum):
    """TensorRT-LLM's `FinishReason`, same names and numbers."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class StopReason(Enum):
    """Why a front end asks for a request to end early."""

    CANCELLED = "cancelled"
    STOP_WORDS = "stop_words"
    TIMED_OUT = "timed_out"


CUT_SHORT: frozenset[FinishReason] = frozenset({FinishReason.TIMED_OUT, FinishReason.CANCELLED})
"""Reasons from outside: the last response carries what there is so far."""


@dataclass(frozen=True, slots=True)
class StopSignal:
    """End request `request_id`, or one of its sequences, in the next iteration; unknown ids are ignored.

    `requested_ns` is when the front end asked for it, by the clock of `IterationInput.now_ns`; 0: unknown.
    """

    request_id: int
    reason: StopReason = StopReason.CANCELLED
    sequence_index: int | None = None
    requested_ns: int = 0


FINISH_REASON_OF_STOP: dict[StopReason, FinishReason] = {
    StopReason.CANCELLED: FinishReason.CANCELLED,
    StopReason.STOP_WORDS: FinishReason.STOP_WORDS,
    StopReason.TIMED_OUT: FinishReason.TIMED_OUT,
}
