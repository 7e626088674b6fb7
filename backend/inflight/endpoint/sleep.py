"""An engine's sleep: it has no weights, and refuses requests, until it is woken. Any thread.

The KV cache is given back too, or kept for the requests after waking.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from inflight.core.ports import ModelMemory
from inflight.core.request.sleep import SleepAction
from inflight.errors import ConfigError, Unavailable, Unsupported, without_places

_log = logging.getLogger(__name__)
_SLEEPS = "the engine sleeps, and takes no requests until it is woken (POST /wake_up)"

FinishRequests = Callable[[float, Callable[[], None]], bool]
"""A function that waits until every request is answered, at most the given number of seconds.

If they are, it calls the given function before another request can be accepted. It returns whether they are."""


class Sleep:
    """Whether an engine sleeps, and the change from one to the other.

    Args:
        memory: Gives back the model's memory, and loads the model again; None: the engine cannot sleep.
        finish: Waits for the requests in flight.
        cancel: Cancels them.
    """

    def __init__(
        self, memory: ModelMemory | None, finish: FinishRequests, cancel: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._finish = finish
        self._cancel = cancel
        self._changing = threading.Lock()
        self._is_asleep = False
        self._has_cache = True  # also in sleep, if it was kept
        self._refuses_new = False
        self._refuses_continuations = False

    def check_awake(self, is_continuation: bool) -> None:
        """Raise Unavailable for a request that may not be accepted. Never blocks.

        While the engine waits for the requests in flight to end, it accepts continuations of them.
        """
        if self._refuses_continuations or (self._refuses_new and not is_continuation):
            raise Unavailable(_SLEEPS)

    def carry_out(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Carry out a command, and return whether the engine sleeps or is falling asleep.

        A command waits for the end of an earlier one; ASK does not.

        Args:
            action: The command. WAKE_UP does nothing if the engine is awake. SLEEP does nothing if it sleeps,
                except that it gives back a KV cache that was kept.
            timeout_s: How long to wait for requests in flight, or for another command, in seconds.
            only_weights: Whether to keep the KV cache in sleep; WAKE_UP raises unless it was kept.

        Raises:
            Unavailable: Requests did not finish in time, and the engine stays awake; or the model could not be
                loaded, and the engine stays asleep.
            Unsupported: The engine cannot sleep, cannot keep its KV cache, or has not kept it.
        """
        if self._memory is None:
            raise Unsupported("this engine cannot sleep: the parameter enable_sleep_mode is false")
        if action is SleepAction.ASK:
            return self._refuses_new
        if only_weights and not self._memory.can_keep_cache:
            raise Unsupported(
                "this engine cannot keep its KV cache in sleep: it gives back all memory or none"
            )
        if not self._changing.acquire(timeout=timeout_s):
            raise Unavailable("the engine is still falling asleep or waking up")
        try:
            if action is SleepAction.WAKE_UP:
                if self._is_asleep:
                    self._wake_up(self._memory, only_weights)
            elif not self._is_asleep:
                self._fall_asleep(self._memory, timeout_s, action is SleepAction.ABORT, only_weights)
            elif self._has_cache and not only_weights:
                self._release(self._memory, keeps_cache=False)
            return self._is_asleep
        finally:
            self._changing.release()

    def _fall_asleep(self, memory: ModelMemory, timeout_s: float, cancels: bool, only_weights: bool) -> None:
        self._refuses_new = True
        try:
            if cancels:
                self._refuse_continuations()
                self._cancel()
            if not self._finish(timeout_s, self._refuse_continuations):
                raise Unavailable(
                    f"requests in flight did not finish in {timeout_s:g} s, so the engine stays awake"
                )
            self._release(memory, only_weights)
        except BaseException:
            self._accept()
            raise
        self._is_asleep = True

    def _release(self, memory: ModelMemory, keeps_cache: bool) -> None:
        memory.release(keeps_cache)
        self._has_cache = keeps_cache
        given_back = "the weights are given back" if keeps_cache else "weights and KV cache are given back"
        _log.info("the engine sleeps: %s", given_back)

    def _wake_up(self, memory: ModelMemory, only_weights: bool) -> None:
        if only_weights and not self._has_cache:
            raise Unsupported("the KV cache was given back too, and comes back together with the weights")
        begun_s = time.monotonic()
        try:
            memory.load()
        except Exception as error:  # also the device's, for example if another process has taken its memory
            _log.error("the engine cannot wake up: %s", error, exc_info=not isinstance(error, ConfigError))
            raise Unavailable(without_places(f"the engine cannot wake up: {error}")) from error
        self._is_asleep, self._has_cache = False, True
        self._accept()
        _log.info("the engine is awake: the model was loaded in %.1f s", time.monotonic() - begun_s)

    def _refuse_continuations(self) -> None:
        self._refuses_continuations = True

    def _accept(self) -> None:
        self._refuses_new = self._refuses_continuations = False
