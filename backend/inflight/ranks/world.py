"""What the start of a distributed engine asks of MPI, as a Protocol, so that tests can do without."""

from __future__ import annotations

from typing import Protocol


class World(Protocol):
    """All ranks that were started together; `inflight.ranks.mpi.MpiWorld` is one.

    Every rank makes the same calls in the same order. They may spin while they wait for each other.

    Attributes:
        rank: This one, 0 .. size - 1.
        size: How many there are.
    """

    rank: int
    size: int

    def broadcast(self, message: bytes = b"") -> bytes:
        """Rank 0's `message`, on every rank."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank."""
