"""Kernel launches and tile sizes, shared by the modules of kernels."""

from __future__ import annotations

from typing import Any

PER_BATCH = ("rows", "slots", "positions", "places", "tiles")
"""Arguments whose addresses change with the number of rows. If kernels were specialized for the alignment of these
arguments, the first batch with another number of rows would wait for the compiler."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a Triton kernel, whose types Triton does not declare."""
    kernel[grid](*arguments, **constants)


def power_of_two(number: int) -> int:
    """Return the smallest power of two >= `number`; sizes of tiles must be powers of two."""
    return 1 << max(0, number - 1).bit_length()
