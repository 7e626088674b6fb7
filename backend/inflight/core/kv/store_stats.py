"""Statistics of a block store and of its tiers: host memory and files, in which KV blocks are saved. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

HOST, DISK = "host", "disk"
"""The tiers' media, from the fastest to the slowest."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """The content of one tier, and what it has done since the start. Snapshots of recurrent state count as blocks.

    Attributes:
        medium: HOST or DISK.
        max_bytes: Maximum size of the content; 0: there is no such tier.
        num_blocks, num_bytes: The blocks that the tier holds. Sizes of files include a digest of 16 bytes.
        num_saved, saved_bytes: Blocks that were written to it.
        num_loaded, loaded_bytes: Blocks that were loaded from it into the device's cache.
        num_dropped, dropped_bytes: Blocks that it held and does not hold any more: removed to make room, because
            of their age, because they could not be read or must not be loaded again, or replaced.
        least_bytes, most_bytes: The smallest and the largest size of the content since the statistics before;
            counted only for HOST.
    """

    medium: str
    max_bytes: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_saved: int = 0
    saved_bytes: int = 0
    num_loaded: int = 0
    loaded_bytes: int = 0
    num_dropped: int = 0
    dropped_bytes: int = 0
    least_bytes: int = 0
    most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of the blocks that a block store has copied from and to the device's cache, and its tiers.

    Attributes:
        block_bytes: Bytes of a block on the device; 0: blocks are not saved.
        num_saved, saved_bytes: Blocks that were copied from the device and written to at least one tier.
        num_loaded, loaded_bytes: Blocks that were copied to the device.
        tiers: The tiers that there are, the fastest first.
    """

    block_bytes: int = 0
    num_saved: int = 0
    saved_bytes: int = 0
    num_loaded: int = 0
    loaded_bytes: int = 0
    tiers: tuple[TierStats, ...] = ()

    def at_rest(self) -> StoreStats:
        """Return the statistics after a time in which nothing has changed."""
        host = self.tier(HOST)
        if host.least_bytes == host.most_bytes:
            return self
        rested = replace(host, least_bytes=host.num_bytes, most_bytes=host.num_bytes)
        return replace(self, tiers=tuple(rested if tier is host else tier for tier in self.tiers))

    def tier(self, medium: str) -> TierStats:
        """Return the statistics of a tier, all 0 if there is no such tier."""
        return next((tier for tier in self.tiers if tier.medium == medium), TierStats(medium))
