"""Helpers that the modules of kernels share: kernel launches, and tile sizes."""

from __future__ import annotations

from typing import Any

PER_BATCH = ("rows", "slots", "positions", "places", "tiles")
"""Arguments that lie at other addresses for every number of rows: were kernels compiled for how these are aligned,
the first batch of another number would wait for a compiler."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel of Triton's, whose types it does not declare."""
    kernel[grid](*arguments, **constants)


def power_of_two(number: int) -> int:
    """The next one: tiles are of such sizes."""
    return 1 << max(0, number - 1).bit_length()
