"""The interface of an attention over the paged KV cache, for decoders on torch's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow


class Attention(Protocol):
    """Computes the attention of packed rows, one layer at a time, by a plan made once an iteration.

    Attributes:
        has_fixed_shapes: Whether plans and results of generation batches follow from the number of rows alone, and
            nothing is asked of the host.
        takes_fixed_rows: Whether it reads `PackedBatch.fixed`, so that the same is true of batches with chunks.
        name: What a log calls it.
    """

    has_fixed_shapes: bool
    takes_fixed_rows: bool
    name: str

    def plan(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, Any]:
        """The plan that `attend` takes, for the layers of each window (None: every token sees all before it)."""
        ...

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        plan: Any,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The attention output of every row.

        Args:
            queries: [rows, heads, head_dim].
            keys: [rows, kv_heads, head_dim], in the cache already.
            values: [rows, kv_heads, head_dim], in the cache already.
            layer: Which layer's cache to read.
            plan: For this layer's window.
            cache: Where earlier tokens' keys and values are.
            sinks: Each head's learned score [heads], of a model that has them.

        Returns:
            [rows, heads * head_dim].
        """
        ...
