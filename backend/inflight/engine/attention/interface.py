"""The interface of an attention over the paged KV cache, for decoders on torch's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow


class Attention(Protocol):
    """Computes the attention of packed rows, layer by layer, with metadata made once per iteration.

    Attributes:
        has_fixed_shapes: Whether a generation batch can be recorded: shapes depend on the number of rows
            alone, and no call waits for the device.
        takes_fixed_rows: Whether it reads `PackedBatch.fixed`, so that batches with chunks can be recorded too.
        name: The attention's name in logs.
    """

    has_fixed_shapes: bool
    takes_fixed_rows: bool
    name: str

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, Any]:
        """Return the metadata for `attend`, by the window of the layers (None: every token sees all tokens
        before it)."""
        ...

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        metadata: Any,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output of every row.

        Args:
            queries: [rows, heads, head_dim].
            keys: [rows, kv_heads, head_dim], already in the cache.
            values: [rows, kv_heads, head_dim], already in the cache.
            layer: The layer, whose cache is read.
            metadata: The metadata for this layer's window.
            cache: The KV cache with the keys and values of earlier tokens.
            sinks: Each head's learned score [heads], for a model that has sinks.

        Returns:
            [rows, heads * head_dim].
        """
        ...
