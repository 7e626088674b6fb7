"""Counts of what is written to, loaded from and dropped from one tier of the block store."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.core.kv.store_stats import TierStats


@dataclass(slots=True)
class Traffic:
    """A number of blocks, and their bytes."""

    count: int = 0
    num_bytes: int = 0

    def add(self, size: int) -> None:
        """Count a block of `size` bytes."""
        self.count += 1
        self.num_bytes += size


@dataclass(slots=True)
class TierCounts:
    """The counts of a tier, from which follows what it holds. Not thread-safe.

    Attributes:
        medium, max_bytes: As in `TierStats`.
        found: Blocks that the tier held at the start.
        saved, loaded, dropped: Blocks since the start, as in `TierStats`.
        least_bytes, most_bytes: Sizes since `begin_peaks` was last called, as noted by `note_peaks`.
    """

    medium: str
    max_bytes: int
    found: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    loaded: Traffic = field(default_factory=Traffic)
    dropped: Traffic = field(default_factory=Traffic)
    least_bytes: int = 0
    most_bytes: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the tier holds."""
        return self.found.count + self.saved.count - self.dropped.count

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that the tier holds."""
        return self.found.num_bytes + self.saved.num_bytes - self.dropped.num_bytes

    def note_peaks(self) -> None:
        """Called when the content has changed."""
        self.least_bytes = min(self.least_bytes, self.num_bytes)
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def begin_peaks(self) -> None:
        """Forget the sizes before now."""
        self.least_bytes = self.most_bytes = self.num_bytes

    def stats(self) -> TierStats:
        """Return a frozen copy of the counts."""
        return TierStats(
            medium=self.medium,
            max_bytes=self.max_bytes,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            num_saved=self.saved.count,
            saved_bytes=self.saved.num_bytes,
            num_loaded=self.loaded.count,
            loaded_bytes=self.loaded.num_bytes,
            num_dropped=self.dropped.count,
            dropped_bytes=self.dropped.num_bytes,
            least_bytes=self.least_bytes,
            most_bytes=self.most_bytes,
        )
