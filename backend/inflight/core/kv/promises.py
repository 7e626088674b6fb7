"""Promises: what running sequences and loads are about to make findable, so that other sequences can wait."""

from __future__ import annotations

from collections import Counter


class Promises(Counter[bytes]):
    """How many sequences and loads promise a block, or a snapshot at its end, by digest; without zeros."""

    def end(self, digest: bytes) -> None:
        """Withdraw one promise, because it was kept or will not be."""
        self[digest] -= 1
        if not self[digest]:
            del self[digest]
