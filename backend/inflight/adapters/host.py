"""Construction of a server's adapter cache from its parameters. Loading thread."""

from __future__ import annotations

from collections.abc import Callable

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.lora_rows import largest_adapter_bytes
from inflight.adapters.sources import AdapterFolders, AdapterLoader
from inflight.core.request.adapter import ITEM_SIZES
from inflight.errors import ConfigError
from inflight.models.registry import ModelDescription

_USUAL_BYTES = 1 << 30


def make_adapter_cache(
    model: ModelDescription,
    max_rank: int,
    max_bytes: int | None,
    dtype: str,
    notify: Callable[[], None],
    folders: AdapterFolders,
) -> HostAdapterCache:
    """Return rank 0's cache, filled from the prefetch folder as far as adapters fit.

    Args:
        model: Model against which adapters are checked.
        max_rank: lora_cache_max_adapter_size.
        max_bytes: lora_cache_host_memory_bytes; None: 1 GiB, or the size of one adapter of the largest rank
            if that is larger.
        dtype: Type of weights in requests, from which the size of the largest adapter is computed.
        notify: Wakes the loop; called on any thread.
        folders: Folders that the server's operator has configured.

    Raises:
        ConfigError: One adapter of the largest rank does not fit into `max_bytes`, or a folder does not exist.
    """
    largest = largest_adapter_bytes(model.decoder, max_rank, ITEM_SIZES[dtype])
    if max_bytes is None:
        max_bytes = max(_USUAL_BYTES, largest)
    if largest > max_bytes:
        raise ConfigError(
            "Not enough space allocated to host LoRA cache to hold 1 max sized LoRA: one of rank "
            f"lora_cache_max_adapter_size, {max_rank}, takes {largest} bytes as {dtype}, and "
            f"lora_cache_host_memory_bytes is {max_bytes}"
        )
    folders.check()
    cache = HostAdapterCache(AdapterLoader(model, max_rank, folders), max_bytes, notify)
    cache.prefetch(folders.prefetched_ids())
    return cache
