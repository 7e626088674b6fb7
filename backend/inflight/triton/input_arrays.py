"""Convert the inputs of Triton's requests to numpy arrays.

numpy has no BF16 type, and Triton's Python backend exports BF16 tensors only as DLPack capsules. This module
reads the capsule itself, because most models of the repository do not import torch. The array of a BF16
tensor holds the bits of each number as uint16. Runs on the thread that calls execute.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BFLOAT_CODE = 4  # kDLBfloat
_CPU = 1  # kDLCPU
_NAME = b"dltensor"


class _DLTensor(ctypes.Structure):
    """The beginning of a capsule's content: DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def input_arrays(request: Any) -> dict[str, NDArray[Any]]:
    """Return the inputs of one of Triton's requests: arrays by the names that the client used."""
    return {tensor.name(): _as_array(tensor) for tensor in request.inputs()}


def _as_array(tensor: Any) -> NDArray[Any]:
    try:
        return tensor.as_numpy()
    except Exception:  # as_numpy refuses BF16 with an exception class that exists only in Triton's stub
        bits = _bfloat16_bits(tensor.to_dlpack())
        if bits is None:
            raise
        return bits


def _bfloat16_bits(capsule: Any) -> NDArray[np.uint16] | None:
    """Return a copy of a BF16 tensor's bits, as uint16 in the tensor's shape.

    Returns None for a tensor of another type, or in the memory of another device.

    Args:
        capsule: Capsule of a contiguous tensor, from Triton's `to_dlpack`.
    """
    tensor = _DLTensor.from_address(_get_pointer(capsule, _NAME))
    if (tensor.device_type, tensor.code, tensor.bits, tensor.lanes) != (_CPU, _BFLOAT_CODE, 16, 1):
        return None
    shape = tensor.shape[: tensor.num_dims]
    size = 2 * prod(shape)
    content = ctypes.string_at(tensor.data + tensor.byte_offset, size) if size else b""
    return np.frombuffer(content, np.uint16).reshape(shape)
