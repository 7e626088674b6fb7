"""Weights and tables that came with requests, as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.core.request.adapter import Matrix
from inflight.sampling.transfer import upload

_HOST = torch.device("cpu")


def to_tensor(matrix: Matrix, device: torch.device = _HOST) -> Tensor:
    """The numbers on `device`, in the dtype that they came in, not to be changed; nobody waits for the device.

    On a CPU they stay where they are, if torch takes that memory: it takes none that may not be written to.
    """
    data = np.frombuffer(memoryview(matrix.buffer.data).cast("B"), np.uint8)
    return (
        upload(data if data.flags.writeable else data.copy(), device)
        .view(getattr(torch, matrix.dtype))
        .view(matrix.shape)
    )
