"""Finds out which peers are lost, by what was heard of them and when. Pure: it is told the time.

Silence counts from a peer's first message on: until then it may still be busy starting. Whether silence is the
peer's or this process's own, which was stopped or had no time to listen, only the caller can know: `forgive`. The
heartbeat's thread calls it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

NEVER = 2**63 - 1
"""An iteration that is never finished: whoever failed in it is not in step with the others any more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that will not take part any more, and how that is known ("it has been silent for 5.0 s")."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    iteration: int
    heard_s: float


class FailureDetector:
    """The signs of life that one process has from its peers, and which peers it therefore counts as lost.

    Args:
        peers: Their ranks.
        timeout_s: Silence after which a peer is lost, and time for the others to get past an iteration in which a
            rank failed.

    Attributes:
        patience_s: Silence after which a peer is lost, where that is not `timeout_s`.
    """

    def __init__(self, peers: Collection[int], timeout_s: float) -> None:
        self.patience_s = self._timeout_s = timeout_s
        self._heard_s: dict[int, float] = {}
        self._progress = dict.fromkeys(peers, 0)
        self._failures: list[_Failure] = []

    def heard(self, rank: int, now_s: float, progress: int | None = None) -> None:
        """Note that a message of `rank` came.

        Args:
            rank: The sender.
            now_s: When.
            progress: The number of the first iteration that the sender has not finished, if the message says it.
        """
        self._heard_s[rank] = now_s
        if progress is not None:
            self._progress[rank] = progress

    def left(self, rank: int) -> None:
        """Note that `rank` has said goodbye: nothing more is expected of it."""
        self._heard_s.pop(rank, None)
        self._progress.pop(rank, None)

    def failed(self, rank: int, iteration: int, now_s: float) -> None:
        """Note that a forward pass of a peer or of this process raised; NEVER: it is lost, whatever others do."""
        self._failures.append(_Failure(rank, iteration, now_s))

    def forgive(self, now_s: float) -> None:
        """Note that nobody was listening until now: every peer gets a full timeout again."""
        self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._failures = [_Failure(one.rank, one.iteration, now_s) for one in self._failures]

    def loss(self, now_s: float, own_progress: int) -> Loss | None:
        """The first rank found lost, if any.

        Args:
            now_s: The time by the same clock as everywhere here.
            own_progress: The number of the first iteration that this process has not finished.
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
                return Loss(one.rank, "it is not in step with the others any more")
            if slowest <= one.iteration:
                return Loss(one.rank, f"it failed alone in iteration {one.iteration}: the others wait for it")
        return None
