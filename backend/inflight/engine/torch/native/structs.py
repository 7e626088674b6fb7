"""What crosses into the compiled code: the structs of source/layer.h and penalties.h, field for field, the
functions' signatures, and the decoder that they work on.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_int64, c_void_p


class LinearStruct(Structure):
    """A packed matrix."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("corrections", c_void_p),
        ("columns", c_int32),
        ("inner", c_int32),
        ("kind", c_int32),
    )


class NormStruct(Structure):
    """Parameters of a norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LayerStruct(Structure):
    """A layer and its part of the KV cache."""

    _fields_ = (
        ("attention_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("recent", c_int32),
        ("sinks", c_int32),
    )


class ShapeStruct(Structure):
    """Sizes of one rank's part of the model."""

    _fields_ = (
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("inner", c_int32),
        ("tokens_per_block", c_int32),
        ("is_gated", c_int32),
        ("activation", c_int32),
        ("num_threads", c_int32),
        ("eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class BatchStruct(Structure):
    """The rows of one forward pass."""

    _fields_ = (
        ("num_rows", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_spans", c_int64),
        ("spans", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
    )


class PenalizedRowsStruct(Structure):
    """Rows of logits that penalties are taken from."""

    _fields_ = (
        ("count", c_int64),
        ("rows", c_void_p),
        ("penalties", c_void_p),
        ("history", c_void_p),
        ("history_width", c_int64),
        ("slots", c_void_p),
        ("lengths", c_void_p),
    )


_SIGNATURES = {
    "create": (c_void_p, (POINTER(ShapeStruct), POINTER(LayerStruct))),
    "destroy": (None, (c_void_p,)),
    "plan": (c_bool, (c_void_p, POINTER(BatchStruct))),
    "run": (c_bool, (c_void_p, POINTER(BatchStruct), c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "run_to_logits": (
        c_bool,
        (
            c_void_p,
            POINTER(BatchStruct),
            c_void_p,
            c_int32,
            POINTER(NormStruct),
            POINTER(LinearStruct),
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
        ),
    ),
    "logits": (
        c_bool,
        (c_void_p, POINTER(NormStruct), POINTER(LinearStruct), c_void_p, c_void_p, c_int64, c_void_p),
    ),
    "find_peaks": (None, (c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)),
    "penalize": (c_int32, (c_void_p, c_void_p, c_int32, POINTER(PenalizedRowsStruct))),
    "draw": (c_bool, (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    "unpack_rows": (None, (c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_void_p)),
    "pack": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "pack_int8": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "quantize": (None, (c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int32)),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function of the library its signature; what they do, source/decoder.cpp says."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class Handle:
    """A decoder in the compiled code, destroyed when nothing refers to this object any more.

    Attributes:
        exists: Whether its threads could be started.
    """

    def __init__(self, library: ctypes.CDLL, shape: ShapeStruct, layers: ctypes.Array[LayerStruct]) -> None:
        self._library = library
        self._layers = layers  # which it points to
        self._as_parameter_ = library.create(shape, layers)
        self.exists = self._as_parameter_ is not None

    def __del__(self) -> None:
        if getattr(self, "_as_parameter_", None) is not None:
            self._library.destroy(self._as_parameter_)
