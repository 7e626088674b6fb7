"""An engine's sleep: it has neither weights nor KV cache, and refuses requests, until it is woken. Any thread."""

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
        self._refuses_new = False
        self._refuses_continuations = False

    def check_awake(self, is_continuation: bool) -> None:
        """Raise Unavailable for a request that may not be accepted. Never blocks.

        While the engine waits for requests in flight, these may be continued.
        """
        if self._refuses_continuations or (self._refuses_new and not is_continuation):
            raise Unavailable(_SLEEPS)

    def carry_out(self, action: SleepAction, timeout_s: float) -> bool:
        """Carry out a command, and return whether the engine sleeps or is falling asleep.

        A command waits for the end of an earlier one; ASK does not.

        Args:
            action: The command; to sleep while asleep, or to wake up while awake, does nothing.
            timeout_s: How long to wait for requests in flight, or for another command, in seconds.

        Raises:
            Unavailable: Requests did not finish in time, and the engine stays awake; or the model could not be
                loaded, and the engine stays asleep.
            Unsupported: The engine cannot sleep.
        """
        if self._memory is None:
            raise Unsupported("this engine cannot sleep: the parameter enable_sleep_mode is false")
        if action is SleepAction.ASK:
            return self._refuses_new
        if not self._changing.acquire(timeout=timeout_s):
            raise Unavailable("the engine is still falling asleep or waking up")
        try:
            if action in (SleepAction.SLEEP, SleepAction.ABORT) and not self._is_asleep:
                self._fall_asleep(self._memory, timeout_s, cancels=action is SleepAction.ABORT)
            elif action is SleepAction.WAKE_UP and self._is_asleep:
                self._wake_up(self._memory)
            return self._is_asleep
        finally:
            self._changing.release()

    def _fall_asleep(self, memory: ModelMemory, timeout_s: float, cancels: bool) -> None:
        self._refuses_new = True
        try:
            if cancels:
                self._refuse_continuations()
                self._cancel()
            if not self._finish(timeout_s, self._refuse_continuations):
                raise Unavailable(
                    f"requests in flight did not finish in {timeout_s:g} s, so the engine stays awake"
                )
            memory.release()
        except BaseException:
            self._accept()
            raise
        self._is_asleep = True
        _log.info("the engine sleeps: weights and KV cache are given back")

    def _wake_up(self, memory: ModelMemory) -> None:
        begun_s = time.monotonic()
        try:
            memory.load()
        except Exception as error:  # also the device's, for example if another process has taken its memory
            _log.error("the engine cannot wake up: %s", error, exc_info=not isinstance(error, ConfigError))
            raise Unavailable(without_places(f"the engine cannot wake up: {error}")) from error
        self._is_asleep = False
        self._accept()
        _log.info("the engine is awake: the model was loaded in %.1f s", time.monotonic() - begun_s)

    def _refuse_continuations(self) -> None:
        self._refuses_continuations = True

    def _accept(self) -> None:
        self._refuses_new = self._refuses_continuations = False
