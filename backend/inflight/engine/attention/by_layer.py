"""The attention of each layer of a decoder: by the layer's window, and by whether the batch has pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from inflight.engine.attention.interface import Attention
from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow, picture_windows

AttendLayer = Callable[..., Tensor]
"""`Attention.attend` of one layer: a function of queries, keys, values, layer and `sinks`."""


class AttentionByLayer:
    """Prepares the attention of all layers for a batch.

    Args:
        attention: Computes batches without rows of pictures that attend to each other.
        windows: Each layer's window.
        bidirectional_layers: `DecoderConfig.bidirectional_layers` of these layers.
        max_sequence_length: Longest sequence in tokens.
        for_pictures: Computes the other batches; None: `attention` does.

    Attributes:
        windows: The layers' windows, each once.
    """

    def __init__(
        self,
        attention: Attention,
        windows: Sequence[AttentionWindow | None],
        bidirectional_layers: Sequence[bool] = (),
        max_sequence_length: int = 0,
        for_pictures: Attention | None = None,
    ) -> None:
        self._attention, self._for_pictures = attention, for_pictures or attention
        self._layer_windows = self._layer_picture_windows = windows
        if bidirectional_layers:
            self._layer_picture_windows = picture_windows(windows, bidirectional_layers, max_sequence_length)
        self.windows = tuple(dict.fromkeys(self._layer_windows))
        self._picture_windows = tuple(dict.fromkeys(self._layer_picture_windows))

    def prepare(self, packed: PackedBatch, cache: KvCache) -> list[AttendLayer]:
        """Return the attention of each layer for a batch, with the metadata that layers of one window share."""
        attention, of_layers, windows = self._attention, self._layer_windows, self.windows
        if packed.ends is not None:
            attention, of_layers, windows = (
                self._for_pictures,
                self._layer_picture_windows,
                self._picture_windows,
            )
        metadata = attention.prepare(packed, cache, windows)
        return [partial(attention.attend, metadata=metadata[window], cache=cache) for window in of_layers]
