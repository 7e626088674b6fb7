"""Attention windows of layers: the checkpoint's sliding windows and chunks, and configured windows.

A window limits which keys are read, not which are stored: KV blocks outside of the window still belong to their
sequence, so no memory is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.errors import ConfigError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A window: a token at position p sees positions p - `recent` + 1 to p, and positions below `sinks`.

    With `is_chunk`, sequences are divided into chunks of `recent` tokens, and a token sees no other chunk. With
    `is_bidirectional`, a token of a picture also sees the later tokens of the picture.

    Attributes:
        recent: Number of recent tokens, at least 1.
        sinks: Number of first tokens that are always seen; 0 for a plain sliding window.
        is_chunk: Whether the window begins at a multiple of `recent`.
        is_bidirectional: Whether tokens see up to `PackedBatch.ends` instead of their own positions.
        begin: The first position of a sequence that generation rows see, apart from sinks.
    """

    recent: int
    sinks: int = 0
    is_chunk: bool = False
    is_bidirectional: bool = False
    begin: int = 0

    @property
    def size(self) -> int:
        """Maximum number of tokens that a token sees."""
        return self.recent + self.sinks


def layer_windows(
    checkpoint_windows: Sequence[int | None],
    configured: Sequence[int],
    num_sinks: int,
    max_sequence_length: int,
    checkpoint_chunks: Sequence[int | None] = (),
) -> tuple[AttentionWindow | None, ...]:
    """Return each layer's window; None: a token sees all tokens before it, as with a window of the longest
    sequence.

    A layer gets the smaller of the checkpoint's and the configured window. Sinks are part of the window: in a
    window of n tokens with s sinks, a token sees the first s tokens of its sequence and the last n - s. Tokens
    keep their positions, and context and generation have the same window. TensorRT-LLM's StreamingLLM instead
    counts positions inside the window, and a token of the context sees the whole context before it; then
    generated tokens would depend on where a request's context ended, and so on whether the request was ever
    paused.

    Args:
        checkpoint_windows: The checkpoint's window of each layer; None for a layer without one.
        configured: `max_attention_window_size`; layer i uses entry i % n. Empty: no window is configured.
        num_sinks: `sink_token_length`.
        max_sequence_length: Longest sequence in tokens.
        checkpoint_chunks: The length of each layer's chunks, of chunked attention; None for a layer without
            chunks, empty for a model without them.

    Raises:
        ConfigError: A window consists of sinks only, or is configured for a layer with chunks.
    """
    if len(configured) > len(checkpoint_windows):
        _logger.warning(
            "max_attention_window_size has %d entries, but the model has %d layers",
            len(configured),
            len(checkpoint_windows),
        )
    windows = [
        _window(
            own, configured[layer % len(configured)] if configured else None, num_sinks, max_sequence_length
        )
        for layer, own in enumerate(checkpoint_windows)
    ]
    for layer, length in enumerate(checkpoint_chunks):
        if length is not None and length < max_sequence_length:
            if windows[layer] is not None:
                raise ConfigError(
                    f"max_attention_window_size is {list(configured)}, expected at least the longest sequence, "
                    f"{max_sequence_length}: layer {layer} attends to chunks of {length} tokens"
                )
            windows[layer] = AttentionWindow(length, is_chunk=True)
    return tuple(windows)


def picture_windows(
    windows: Sequence[AttentionWindow | None], bidirectional_layers: Sequence[bool], max_sequence_length: int
) -> tuple[AttentionWindow | None, ...]:
    """Return each layer's window for batches with pictures whose tokens attend to each other.

    Args:
        windows: Each layer's window for other batches.
        bidirectional_layers: `DecoderConfig.bidirectional_layers`, not empty.
        max_sequence_length: Longest sequence in tokens.
    """
    everything = AttentionWindow(max_sequence_length)
    return tuple(
        replace(window or everything, is_bidirectional=True) if is_bidirectional else window
        for window, is_bidirectional in zip(windows, bidirectional_layers, strict=True)
    )


def _window(
    own: int | None, configured: int | None, num_sinks: int, max_sequence_length: int
) -> AttentionWindow | None:
    size = min(window for window in (own, configured, max_sequence_length) if window is not None)
    if size == max_sequence_length:
        return None
    if size <= num_sinks:
        whose = "max_attention_window_size has" if size == configured else "the checkpoint has layers with"
        raise ConfigError(
            f"sink_token_length is {num_sinks}, expected less than {size}: {whose} a window of {size}, "
            "which the sinks are a part of"
        )
    return AttentionWindow(size - num_sinks, num_sinks)
