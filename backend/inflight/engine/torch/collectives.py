"""What the forward pass asks of the other tensor-parallel ranks; alone there is nothing to ask."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Called by every rank's loop thread, in the same order with tensors of the same shapes and dtypes."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; `tensor` may be written over."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, by rank, one after another along the last dimension."""


class Alone:
    """The one rank there is."""

    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Nothing to add."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Nothing to put beside it."""
        return tensor


ALONE = Alone()
