"""Attention windows of layers: the checkpoint's sliding windows, and configured ones.

A window changes what is read, not what is stored: KV blocks outside of the window still belong to their sequence,
so no memory is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.errors import ConfigError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A window: a token at position p sees positions above p - `recent`, itself included, and those below `sinks`.

    Attributes:
        recent: Number of recent tokens, at least 1.
        sinks: Number of first tokens that are always seen; 0 for a plain sliding window.
    """

    recent: int
    sinks: int = 0

    @property
    def size(self) -> int:
        """Maximum number of tokens that a token sees."""
        return self.recent + self.sinks


def layer_windows(
    checkpoint_windows: Sequence[int | None],
    configured: Sequence[int],
    num_sinks: int,
    max_sequence_length: int,
) -> tuple[AttentionWindow | None, ...]:
    """Return each layer's window; None: a token sees all tokens before it, as with a window of the longest
    sequence.

    A layer has the smaller of its two windows. Sinks are part of the window: in a window of n tokens with s sinks,
    a token sees the first s of its sequence and the last n - s. Tokens keep their positions, and context and
    generation have the same window. TensorRT-LLM's StreamingLLM instead counts positions inside the window and
    lets a context see all of itself; then tokens would depend on where a request's context ended, and so on
    whether it was ever paused.

    Args:
        checkpoint_windows: By layer, the checkpoint's own window; None for none.
        configured: `max_attention_window_size`; layer i uses entry i % n. Empty: none.
        num_sinks: `sink_token_length`.
        max_sequence_length: Longest sequence in tokens.

    Raises:
        ConfigError: A window consists of sinks only.
    """
    if len(configured) > len(checkpoint_windows):
        _logger.warning(
            "max_attention_window_size has %d entries, but the model has %d layers",
            len(configured),
            len(checkpoint_windows),
        )
    return tuple(
        _window(
            own, configured[layer % len(configured)] if configured else None, num_sinks, max_sequence_length
        )
        for layer, own in enumerate(checkpoint_windows)
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
