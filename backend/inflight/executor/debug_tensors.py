"""The class of debug tensors that clients fetch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class DebugTensorsPerIteration:
    """Debug tensors of iteration number `iter`, by name."""

    iter: int = 0
    debug_tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
