"""Several ranks in one process, without MPI: the leader's broadcasts wait for each follower in a queue.

Each rank runs on its own thread, or all on one that checks `num_unheard` before a rank follows. Waking a rank
that does not sleep, and not waking one that sleeps, are errors.
"""

from __future__ import annotations

import threading
from collections import deque

from inflight.core.request.request import IterationInput
from inflight.errors import Unavailable


def make_ranks(size: int) -> list[InMemoryRanks]:
    """`size` ranks that know each other; the first is the leader."""
    broadcasts = _Broadcasts(size)
    return [InMemoryRanks(broadcasts, rank) for rank in range(size)]


class _Broadcasts:
    """Broadcast inputs per follower, and whether followers were taken to be asleep.

    Attributes:
        changed: Guards the rest; notified when any of it changes.
        unheard: Broadcasts that were not taken yet, by rank.
        error: The error of every call after a rank was lost.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.unheard: list[deque[tuple[IterationInput | None, bool]]] = [deque() for _ in range(size)]
        self.error: Unavailable | None = None


class InMemoryRanks:
    """Implements `inflight.core.ports.Ranks` for one rank.

    Attributes:
        is_leader: Whether this is the leader.
    """

    def __init__(self, broadcasts: _Broadcasts, rank: int) -> None:
        self.is_leader = rank == 0
        self._broadcasts = broadcasts
        self._rank = rank

    @property
    def num_unheard(self) -> int:
        """Number of broadcasts that a follower has not taken yet; with 0, `follow` waits."""
        return len(self._broadcasts.unheard[self._rank])

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """Broadcast to every follower."""
        self._tell(inputs, are_asleep)

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """Wait for the next broadcast.

        AssertionError if the leader was wrong about whether this rank sleeps.
        """
        broadcasts = self._broadcasts
        mine = broadcasts.unheard[self._rank]
        assert not self.is_leader, "the leader follows nobody"
        with broadcasts.changed:
            broadcasts.changed.wait_for(lambda: mine or broadcasts.error)
            if broadcasts.error is not None:
                raise broadcasts.error
            inputs, was_woken = mine.popleft()
        assert was_woken == is_asleep, f"woken: {was_woken}, asleep: {is_asleep}"
        return inputs

    def end(self, are_asleep: bool) -> None:
        """Tell every follower that no broadcast follows."""
        self._tell(None, are_asleep)

    def lose(self, error: Unavailable) -> None:
        """Lose a rank: from now on all calls of all ranks raise `error`, waiting ones too. Any thread."""
        with self._broadcasts.changed:
            self._broadcasts.error = error
            self._broadcasts.changed.notify_all()

    def _tell(self, inputs: IterationInput | None, are_asleep: bool) -> None:
        assert self.is_leader, "a follower has nothing to share"
        broadcasts = self._broadcasts
        with broadcasts.changed:
            if broadcasts.error is not None:
                raise broadcasts.error
            for unheard in broadcasts.unheard[1:]:
                unheard.append((inputs, are_asleep))
            broadcasts.changed.notify_all()
