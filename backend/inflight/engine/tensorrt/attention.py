"""Attention for in-flight batching: packed rows of context chunks and generation, over linear caches.

A slot has its own memory for keys and values, each [kv_heads, max_seq_len, head_dim], which is written in
place. The rows of a network are in the order of their slots. There are two forms:

    split    Generation rows read the caches where they lie. The rows of each chunk are padded to the longest
             chunk, and read a copy of their slot's cache. All else is computed on packed rows.
    packed   One attention for all rows, given each slot's number of rows. TensorRT for RTX does not build it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from inflight.engine.tensorrt.graph import Graph
from inflight.engine.tensorrt.sidecar import Settings
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import DecoderConfig


class NetworkAttention(Protocol):
    """The attention of all layers of a network."""

    def attend(self, index: int, queries: Any, keys: Any, values: Any, window: AttentionWindow | None) -> Any:
        """Define a layer's attention; return its output [rows, heads * head_dim]. Writes the rows' keys and values
        to the caches.

        Args:
            index: The layer.
            queries: [rows, heads, head_dim], already scaled.
            keys: [rows, kv_heads, head_dim].
            values: [rows, kv_heads, head_dim].
            window: The layer's window; None: a row sees all tokens before it.
        """
        ...


class _Caches:
    """Keys and values of all layers: inputs of the network, and outputs in the inputs' memory."""

    def __init__(self, graph: Graph, settings: Settings, held: DecoderConfig) -> None:
        self._graph, self._dtype = graph, settings.dtype
        slots = settings.max_batch_size
        self._shape = (slots, held.num_kv_heads, settings.max_seq_len, held.head_dim)
        self.update_lengths = graph.input("update_lengths", "int32", (slots + 1,))
        self._write_indices = graph.input("write_indices", "int32", (slots,))

    def write(self, index: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return a layer's two caches with the rows' keys and values added."""
        return self._write("k", index, keys), self._write("v", index, values)

    def _write(self, kind: str, index: int, rows: Any) -> Any:
        name = f"{kind}_cache_{index}"
        cache = self._graph.input(name, self._dtype, self._shape)
        written = self._graph.update_cache(cache, rows, self._write_indices, self.update_lengths)
        self._graph.output(f"{kind}_cache_out_{index}", written, alias_of=name)
        return written


class SplitAttention:
    """Attention in the form `split`.

    Args:
        graph: The graph in which it is defined.
        settings: The build's settings.
        held: The model, as this rank computes it.
        windows: The windows of all layers.
        positions: Positions of the rows, int32 [rows].
    """

    def __init__(
        self,
        graph: Graph,
        settings: Settings,
        held: DecoderConfig,
        windows: Iterable[AttentionWindow | None],
        positions: Any,
    ) -> None:
        self._graph, self._held, self._slots = graph, held, settings.max_batch_size
        self._caches = _Caches(graph, settings, held)
        # For float32, TensorRT has attention kernels for a single row, but not for several rows.
        self._may_decompose_chunks = settings.dtype == "float32"
        slots = settings.max_batch_size
        self._chunk_slots = graph.input("ctx_slots", "int32", ("Nc",))
        self._chunk_rows = graph.input("ctx_q_gather", "int32", ("Nc", "Sc"))
        self._places = graph.input("o_gather", "int32", ("T",))
        self._generation_rows = graph.input("gen_q_gather", "int32", (slots,))
        self._generation_lengths = graph.input("gen_kv_lengths", "int32", (slots,))
        indices = torch.arange(settings.max_seq_len, dtype=torch.int32).reshape(1, 1, 1, -1)
        self._indices = graph.constant(indices, "int32")
        of_chunks = graph.unsqueeze(graph.gather(positions, self._chunk_rows), 1, 3)
        of_generation = graph.subtract(
            graph.reshape(self._generation_lengths, slots, 1, 1, 1), graph.constant(1, "int32", 4)
        )
        self._masks = {
            window: (self._seen(of_chunks, window), self._in_window(of_generation, window))
            for window in dict.fromkeys(windows)
        }

    def attend(self, index: int, queries: Any, keys: Any, values: Any, window: AttentionWindow | None) -> Any:
        graph, heads, dim = self._graph, self._held.num_heads, self._held.head_dim
        all_keys, all_values = self._caches.write(index, keys, values)
        chunk_mask, generation_mask = self._masks[window]
        alone = graph.reshape(graph.gather(queries, self._generation_rows), self._slots, heads, 1, dim)
        alone = graph.attention(alone, all_keys, all_values, self._generation_lengths, generation_mask)
        of_chunks = graph.transpose(graph.gather(queries, self._chunk_rows), 0, 2, 1, 3)
        of_chunks = graph.attention(
            of_chunks,
            graph.gather(all_keys, self._chunk_slots),
            graph.gather(all_values, self._chunk_slots),
            mask=chunk_mask,
            may_decompose=self._may_decompose_chunks,
        )
        of_chunks = graph.reshape(graph.transpose(of_chunks, 0, 2, 1, 3), -1, heads * dim)
        read = graph.concat((graph.reshape(alone, self._slots, heads * dim), of_chunks), 0)
        return graph.gather(read, self._places)

    def _seen(self, positions: Any, window: AttentionWindow | None) -> Any:
        """Return whether rows at `positions` [..., 1] see each key: bool [..., max_seq_len]."""
        seen = self._graph.invert(self._graph.is_greater(self._indices, positions))
        in_window = self._in_window(positions, window)
        return seen if in_window is None else self._graph.both(seen, in_window)

    def _in_window(self, positions: Any, window: AttentionWindow | None) -> Any | None:
        if window is None:
            return None
        graph = self._graph
        return graph.is_greater(
            self._indices, graph.subtract(positions, graph.constant(window.recent, "int32", 4))
        )


class PackedAttention:
    """Attention in the form `packed`; arguments as for `SplitAttention`.

    Raises:
        ConfigError: A layer has a sliding window, for which this form has no mask.
    """

    def __init__(
        self,
        graph: Graph,
        settings: Settings,
        held: DecoderConfig,
        windows: Iterable[AttentionWindow | None],
    ) -> None:
        if any(window is not None for window in windows):
            raise ConfigError("packed attention has no mask for this model's sliding windows, expected split")
        self._graph, self._held = graph, held
        self._caches = _Caches(graph, settings, held)
        self._lengths = graph.input("kv_lengths", "int32", (settings.max_batch_size,))

    def attend(self, index: int, queries: Any, keys: Any, values: Any, window: AttentionWindow | None) -> Any:
        graph = self._graph
        all_keys, all_values = self._caches.write(index, keys, values)
        lengths = self._caches.update_lengths, self._lengths
        read = graph.packed_attention(queries, all_keys, all_values, *lengths)
        return graph.reshape(read, -1, self._held.num_heads * self._held.head_dim)
