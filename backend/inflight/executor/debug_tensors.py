"""Tensors kept to be looked at, as a client fetches them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class DebugTensorsPerIteration:
    """Tensors of the iteration whose number is `iter`, by name."""

    iter: int = 0
    debug_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
