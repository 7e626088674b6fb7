"""Converts weights and tables of requests to tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.core.request.adapter import Matrix
from inflight.sampling.transfer import upload

_HOST = torch.device("cpu")


def to_tensor(matrix: Matrix, device: torch.device = _HOST) -> Tensor:
    """Return the elements on `device`, in their dtype, not to be changed; copies asynchronously.

    On a CPU the memory is shared if torch accepts it; it accepts no read-only memory.
    """
    data = np.frombuffer(memoryview(matrix.buffer.data).cast("B"), np.uint8)
    return (
        upload(data if data.flags.writeable else data.copy(), device)
        .view(getattr(torch, matrix.dtype))
        .view(matrix.shape)
    )
