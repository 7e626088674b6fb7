"""Between host and device: uploads that nobody waits for, and one copy back for all that is read together.

On a CPU both are free: what comes back shares memory with what was given. Called on the loop thread.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray, device: torch.device) -> Tensor:
    """A host array on `device`; the array may be changed afterwards unless that is a CPU."""
    return staged(values, device).to(device, non_blocking=True)


def staged(values: NDArray, device: torch.device) -> Tensor:
    """A host array where `device` can fetch it by itself.

    A GPU reads memory that may be paged out only while the host waits. torch takes pinned memory from a pool, and
    not again before the copies out of it are done.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(*tensors: Tensor) -> list[NDArray]:
    """One-dimensional tensors of one device as host arrays; waits for the device, once."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.contiguous() for tensor in tensors]
    joined = torch.cat([part.view(torch.uint8) for part in parts]).cpu().numpy()
    ends = np.cumsum([part.nbytes for part in parts])
    arrays = np.split(joined, ends[:-1])
    return [array.view(_NUMPY[part.dtype]) for array, part in zip(arrays, parts, strict=True)]


_NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}
