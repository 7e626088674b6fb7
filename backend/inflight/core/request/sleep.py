"""The commands that make an engine sleep and wake it. Pure."""

from __future__ import annotations

from enum import Enum


class SleepAction(Enum):
    """A command about an engine's sleep; its answer says whether the engine sleeps or is falling asleep.

    ASK changes nothing. SLEEP finishes the requests in flight, refuses new ones, and gives back the memory of
    the weights, and of the KV cache unless the command is for the weights only. ABORT does the same after it has
    cancelled the requests in flight. WAKE_UP loads the model again.
    """

    ASK = "ask"
    SLEEP = "sleep"
    ABORT = "abort"
    WAKE_UP = "wake_up"
