"""Detects lost peers from the times of their messages. Pure: the time is an argument.

Silence is measured from a peer's first message on, as before that the peer may still be starting. Only the
caller can know whether messages are missing because this process was suspended or had no time to read: see
`forgive`. Used on the heartbeat's thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

NEVER = 2**63 - 1
"""The iteration number of a rank that is no longer in lockstep with the others, as it never finishes."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost rank, and the evidence for the loss, such as "it has been silent for 5.0 s"."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    iteration: int
    heard_s: float


class FailureDetector:
    """The times of messages from a process's peers, from which lost peers are detected.

    Args:
        peers: Ranks of the peers.
        timeout_s: Seconds of silence after which a peer is lost. Also the time in which the other ranks
            must finish an iteration in which a rank failed.

    Attributes:
        patience_s: Seconds of silence after which a peer is lost, if that differs from `timeout_s`.
    """

    def __init__(self, peers: Collection[int], timeout_s: float) -> None:
        self.patience_s = self._timeout_s = timeout_s
        self._heard_s: dict[int, float] = {}
        self._progress = dict.fromkeys(peers, 0)
        self._failures: list[_Failure] = []

    def record_message(self, rank: int, now_s: float, progress: int | None = None) -> None:
        """Record a message of `rank`.

        Args:
            rank: The sender.
            now_s: When it arrived.
            progress: The first iteration that the sender has not finished, if the message has it.
        """
        self._heard_s[rank] = now_s
        if progress is not None:
            self._progress[rank] = progress

    def left(self, rank: int) -> None:
        """Record the goodbye of `rank`, which is no longer watched."""
        self._heard_s.pop(rank, None)
        self._progress.pop(rank, None)

    def failed(self, rank: int, iteration: int, now_s: float) -> None:
        """Record that a forward pass on `rank` raised in `iteration`; if `iteration` is NEVER, the rank is lost at
        once."""
        self._failures.append(_Failure(rank, iteration, now_s))

    def forgive(self, now_s: float) -> None:
        """Restart every timeout, because this process did not read messages until now."""
        self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._failures = [_Failure(one.rank, one.iteration, now_s) for one in self._failures]

    def loss(self, now_s: float, own_progress: int) -> Loss | None:
        """Return the first rank that is found to be lost; None if there is none.

        Args:
            now_s: The current time, by the clock of the other calls.
            own_progress: The first iteration that this process has not finished.
        """
        for rank, heard_s in self._heard_s.items():
            if now_s - heard_s > self.patience_s:
                return Loss(rank, f"it has been silent for {now_s - heard_s:.1f} s")
        due = [
            one for one in self._failures if one.iteration == NEVER or now_s - one.heard_s > self._timeout_s
        ]
        self._failures = [one for one in self._failures if one not in due]
        slowest = min((own_progress, *self._progress.values()))
        for one in due:
            if one.iteration == NEVER:
                return Loss(one.rank, "it is no longer in lockstep with the others")
            if slowest <= one.iteration:
                return Loss(one.rank, f"it failed alone in iteration {one.iteration}: the others wait for it")
        return None
