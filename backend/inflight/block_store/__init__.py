"""KV blocks outside of the device's cache: in host memory and in files, from which they are loaded again."""

from inflight.block_store.files import BlockFiles
from inflight.block_store.identity import cache_identity
from inflight.block_store.store import BlockMemory, HostBlockStore

__all__ = ["BlockFiles", "BlockMemory", "HostBlockStore", "cache_identity"]
