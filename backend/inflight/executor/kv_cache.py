"""The data of KV cache events, as a client fetches them.

A block has a hash, which follows from its tokens and those before it; level 0 is the device, level 1 the host.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UniqueToken:
    """A token, and what else tells it apart: a number of the prompt table or image that it stands for."""

    token_id: int
    token_extra_id: int = 0


@dataclass(frozen=True)
class KVCacheCreatedData:
    """The cache was made; how many blocks each level has."""

    num_blocks_per_cache_level: list[int]


@dataclass(frozen=True)
class KVCacheStoredBlockData:
    """A block that can be found from now on."""

    block_hash: int
    tokens: list[UniqueToken]
    lora_id: int | None = None
    cache_level: int = 0
    priority: int = 35


@dataclass(frozen=True)
class KVCacheStoredData:
    """Blocks that follow one another and can be found from now on; no parent: the first begins a prompt."""

    parent_hash: int | None
    blocks: list[KVCacheStoredBlockData]


@dataclass(frozen=True)
class KVCacheRemovedData:
    """Blocks that cannot be found any more."""

    block_hashes: list[int]


@dataclass(frozen=True)
class KVCacheEventDiffInt:
    """A number that changed."""

    old_value: int
    new_value: int


@dataclass(frozen=True)
class KVCacheUpdatedData:
    """A block whose level or priority changed; None: that one did not."""

    block_hash: int
    cache_level: KVCacheEventDiffInt | None = None
    priority: KVCacheEventDiffInt | None = None


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@dataclass(frozen=True)
class KVCacheEvent:
    """Something that happened to blocks of the KV cache, numbered in order.

    Attributes:
        event_id: Counts from 0, which is the Created event's.
        data: What happened; its class says which kind of event it is.
        window_size: Attention window of the layers that it is about.
        attention_dp_rank: Of several caches; None: there is one.
    """

    event_id: int
    data: KVCacheEventData
    window_size: int = 0
    attention_dp_rank: int | None = None
