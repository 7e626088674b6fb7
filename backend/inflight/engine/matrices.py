"""Converts weights and tables of requests to tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.core.request.adapter import Matrix
from inflight.sampling.transfer import upload

_HOST = torch.device("cpu")


def to_tensor(matrix: Matrix, device: torch.device = _HOST) -> Tensor:
    """Return the matrix as a tensor on `device`, in its dtype, not to be changed; copies asynchronously.

    On a CPU the tensor shares the matrix's memory, unless that is read-only, which torch does not accept.
    """
    data = np.frombuffer(memoryview(matrix.buffer.data).cast("B"), np.uint8)
    return (
        upload(data if data.flags.writeable else data.copy(), device)
        .view(getattr(torch, matrix.dtype))
        .view(matrix.shape)
    )
