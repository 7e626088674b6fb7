"""The classes of KV cache events that clients fetch.

A block's hash is computed from its tokens and all tokens before it. Level 0 is the device, level 1 the host.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UniqueToken:
    """A token id with an extra id, which distinguishes equal ids of different prompt tables or images."""

    token_id: int
    token_extra_id: int = 0


@dataclass(frozen=True)
class KVCacheCreatedData:
    """The cache was created, with this number of blocks in each level."""

    num_blocks_per_cache_level: list[int]


@dataclass(frozen=True)
class KVCacheStoredBlockData:
    """A block that was published."""

    block_hash: int
    tokens: list[UniqueToken]
    lora_id: int | None = None
    cache_level: int = 0
    priority: int = 35


@dataclass(frozen=True)
class KVCacheStoredData:
    """Consecutive blocks that were published. If `parent_hash` is None, the first block begins a prompt."""

    parent_hash: int | None
    blocks: list[KVCacheStoredBlockData]


@dataclass(frozen=True)
class KVCacheRemovedData:
    """Blocks that were removed from the cache."""

    block_hashes: list[int]


@dataclass(frozen=True)
class KVCacheEventDiffInt:
    """A changed number."""

    old_value: int
    new_value: int


@dataclass(frozen=True)
class KVCacheUpdatedData:
    """A block whose level or priority changed. The field of an unchanged value is None."""

    block_hash: int
    cache_level: KVCacheEventDiffInt | None = None
    priority: KVCacheEventDiffInt | None = None


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@dataclass(frozen=True)
class KVCacheEvent:
    """A numbered event of the KV cache.

    Attributes:
        event_id: Number of the event; the Created event has 0.
        data: Data of the event; their class determines the kind of event.
        window_size: Attention window of the layers, in tokens.
        attention_dp_rank: Number of the cache, if there are several; None: there is one.
    """

    event_id: int
    data: KVCacheEventData
    window_size: int = 0
    attention_dp_rank: int | None = None
