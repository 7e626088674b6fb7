"""Transfers between host and device: asynchronous uploads, and a single copy to the host of several tensors.

If the device is a CPU, nothing is copied: results share memory with the arguments. Called on the loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return a host array as a tensor that shares its memory."""
    return torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]  torch declares no array types


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor in host memory as an array that shares its memory."""
    return tensor.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  the same


def to_list(tensor: Tensor) -> list[Any]:
    """Return a tensor's numbers as nested lists; waits for the device."""
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  the same


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to `device`; the array may be changed afterwards, except if the device is a CPU."""
    return staged(values, device).to(device, non_blocking=True)


def staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """Put a host array where `device` can fetch it asynchronously.

    A GPU reads pageable memory only while the host waits, so pinned memory is used. torch takes it from a pool,
    and reuses it only when the copies from it are done.
    """
    tensor = as_tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """Copy one-dimensional tensors of one device to host arrays; waits once for the device."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [as_array(tensor) for tensor in tensors]
    return _split(_join(tensors).cpu(), tensors)


def record_event(device: torch.device) -> torch.cuda.Event:
    """Record an event after all work queued on `device` so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors on their way to the host.

    Attributes:
        tensors: The tensors on the device.
        joined: The tensors' bytes on the host, valid once `end` is reached; None if the tensors are on the host.
        end: The event at the end of the copy; None if nothing is copied.
    """

    tensors: tuple[Tensor, ...]
    joined: Tensor | None = None
    end: torch.cuda.Event | None = None

    @classmethod
    def send(cls, *tensors: Tensor) -> Arriving:
        """Start to copy one-dimensional tensors of one device to the host."""
        device = tensors[0].device
        if device.type == "cpu":
            return cls(tensors)
        joined = _join(tensors).to("cpu", non_blocking=True)  # torch uses pinned memory for that
        return cls(tensors, joined, record_event(device))

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy, and return the tensors as host arrays."""
        if self.joined is None or self.end is None:
            return [as_array(tensor) for tensor in self.tensors]
        self.end.synchronize()
        return _split(self.joined, self.tensors)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def _split(joined: Tensor, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    ends = np.cumsum([tensor.nbytes for tensor in tensors])
    arrays = np.split(as_array(joined), ends[:-1])
    return [array.view(_NUMPY[tensor.dtype]) for array, tensor in zip(arrays, tensors, strict=True)]


_NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}
