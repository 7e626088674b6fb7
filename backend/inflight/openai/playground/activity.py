"""The engine's activity in a few figures for the playground, without data of single requests.

The engine's state is read at most twice a second, however many pages are open. Runs on the event loop; a
thread of the session reads the state.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.errors import RequestError
from inflight.serving.engine_session import EngineSession

_FRESH_S = 0.5
_TIMEOUT_S = 2.0
# Longest time in seconds over which a rate is computed. Over a longer time it would not describe the
# present.
_LONGEST_GAP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Sample:
    """The figures at one time: the figures, the number of tokens generated so far, and the time in seconds."""

    figures: dict[str, Any]
    num_generated: int | None
    at_s: float


class Activity:
    """The engine's activity, read from its state.

    Args:
        session: Session with the engine.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, session: EngineSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: _Sample | None = None
        self._failure: tuple[RequestError, float] | None = None  # (last error, its time in seconds)

    async def read(self) -> dict[str, Any]:
        """Return the current figures, at most half a second old.

        `running` and `waiting` are numbers of sequences, and `slots` is how many sequences can run at a
        time. Of the `kv_blocks` KV blocks, running sequences hold `kv_blocks_used`. `tokens_per_second`
        counts the tokens of all requests since the previous reading; it is None if that was too long ago.
        `problem` is "", or the reason why figures are old or missing (None).

        Raises:
            Unavailable: The engine cannot be reached.
            Unsupported: The engine's server does not provide its state.
        """
        async with self._lock:  # callers that wait for the lock get the figures that are being read
            now_s = self._clock()
            if self._failure is not None and now_s - self._failure[1] < _FRESH_S:
                raise self._failure[0].with_traceback(None)
            self._failure = None
            if self._last is None or now_s - self._last.at_s >= _FRESH_S:
                self._last = _sample(json.loads(await self._ask()), self._last, self._clock())
            return self._last.figures

    async def _ask(self) -> str:
        try:
            return await self._session.wait_for(lambda: self._session.client.state(_TIMEOUT_S))
        except RequestError as error:
            self._failure = error, self._clock()
            raise


def _sample(told: dict[str, Any], last: _Sample | None, now_s: float) -> _Sample:
    batcher = told["batcher"]
    state: dict[str, Any] = batcher["state"] or {}
    blocks: dict[str, Any] = state.get("blocks", {})
    waiting = state.get("waiting")
    num_generated = state.get("generated_tokens")
    figures = {
        "running": len(state["running"]) if state else None,
        "waiting": told["queued_requests"] + len(waiting) if waiting is not None else None,
        "slots": state.get("slots"),
        "kv_blocks": blocks.get("total"),
        "kv_blocks_used": blocks.get("held"),
        "tokens_per_second": _rate(num_generated, last, now_s),
        "problem": batcher.get("stuck") or batcher.get("unanswered") or "",
    }
    return _Sample(figures, num_generated, now_s)


def _rate(num_generated: int | None, last: _Sample | None, now_s: float) -> float | None:
    """Return tokens per second since `last`; None if `last` is missing, too old, or of another engine."""
    if last is None or last.num_generated is None or num_generated is None:
        return None
    seconds, count = now_s - last.at_s, num_generated - last.num_generated
    return round(count / seconds, 1) if count >= 0 and 0 < seconds <= _LONGEST_GAP_S else None
