"""Constants that Python and the compiled code share, compared when a library is loaded."""

from __future__ import annotations

import ctypes
import struct

from inflight.engine.cpu import structs
from inflight.errors import ConfigError
from inflight.shared_constants import (
    FEW_CANDIDATES,
    LARGEST_LOGIT,
    LOW_DIGIT_BITS,
    MIN_SCALE,
    NUM_LIMITS,
    PENALTY_NAMES,
    WEIGHTS_PER_BLOCK,
)

PANEL = 32
"""Number of columns in a panel."""
HALF = 16
"""Number of columns in a register: half a panel."""
PAIR_BYTES = 4
"""Size of the inputs that a lane multiplies at a time, in bytes."""
RANKS_AT_ONCE = 4
"""Number of rows of an adapter's A that are multiplied together."""
ELEMENT, INT8, INT4, FLOAT4, GROUPED_INT8 = range(5)
"""Kinds of `LinearStruct`."""
GROUP_MULTIPLE = 8
"""The number of inputs in a group is a multiple of this."""
OF_GROUP = 8
"""Bytes that a group of an operand takes besides its levels."""
INT4_ZERO_BITS = 31
"""Mask of the zero point in the bits of the scale of a group of 4-bit integers."""
GROUP_WORDS = {INT4: 4, FLOAT4: 2, GROUPED_INT8: 4}
"""Size of a group's scale in bytes, by kind."""
MAX_QUERY_GROUP, MAX_HEAD_DIM = 12, 256
"""Maximum number of query heads per key head, and maximum width of a head, that attention supports."""
MAX_CONV_WIDTH = 8
"""Maximum number of tokens of a recurrent layer's convolution."""
SEGMENT_FIELDS = 5
"""Number of int64 in a segment of rows: state, first row, row after the last, saved, kept."""
NOT_RECURRENT, SHORT_CONV, GATED_DELTA, MAMBA2 = range(4)
"""Kinds of `RecurrentShapeStruct`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
"""The activations of `ShapeStruct`, by their name in DecoderConfig."""
AS_COMPUTED, INT8_CACHE, FP8_CACHE = range(3)
"""The storage of keys and values, in `ShapeStruct`."""
PENALIZED, NO_MEMORY, WRONG_TOKENS = range(3)
"""Results of `penalize`."""
PRODUCTS_ARE_RIGHT, TILES_NOT_PERMITTED, PRODUCTS_ARE_OFF, PRODUCTS_CRASH = range(4)
"""Results of `check_products`."""


def _bits(number: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("=i", struct.pack("=f", number))[0])


_CONSTANTS = {
    "kPanel": PANEL,
    "kLanes": HALF,
    "pair bytes": PAIR_BYTES,
    "kRanksAtOnce": RANKS_AT_ONCE,
    "kElement": ELEMENT,
    "kInt8": INT8,
    "kInt4": INT4,
    "kFloat4": FLOAT4,
    "kGroupedInt8": GROUPED_INT8,
    "kAtOnce": GROUP_MULTIPLE,
    "kOfGroup": OF_GROUP,
    "kZeroBits": INT4_ZERO_BITS,
    "kWord of int4": GROUP_WORDS[INT4],
    "kWord of float4": GROUP_WORDS[FLOAT4],
    "kWord of int8": GROUP_WORDS[GROUPED_INT8],
    "kTile": MAX_QUERY_GROUP,
    "kMaxHeadDim": MAX_HEAD_DIM,
    "sizeof(Linear)": ctypes.sizeof(structs.LinearStruct),
    "sizeof(Norm)": ctypes.sizeof(structs.NormStruct),
    "kMaxConvWidth": MAX_CONV_WIDTH,
    "kNotRecurrent": NOT_RECURRENT,
    "kShortConv": SHORT_CONV,
    "kGatedDelta": GATED_DELTA,
    "kMamba2": MAMBA2,
    "sizeof(Recurrent)": ctypes.sizeof(structs.RecurrentStruct),
    "sizeof(RecurrentShape)": ctypes.sizeof(structs.RecurrentShapeStruct),
    "sizeof(Segment)": 8 * SEGMENT_FIELDS,
    "sizeof(Layer)": ctypes.sizeof(structs.LayerStruct),
    "sizeof(Shape)": ctypes.sizeof(structs.ShapeStruct),
    "sizeof(LatentLayer)": ctypes.sizeof(structs.LatentLayerStruct),
    "sizeof(LatentShape)": ctypes.sizeof(structs.LatentShapeStruct),
    "sizeof(LayerAdapter)": ctypes.sizeof(structs.LayerAdapterStruct),
    "sizeof(Adapter)": ctypes.sizeof(structs.AdapterStruct),
    "sizeof(Batch)": ctypes.sizeof(structs.BatchStruct),
    "sizeof(Routed)": ctypes.sizeof(structs.RoutedStruct),
    "sizeof(PenalizedRows)": ctypes.sizeof(structs.PenalizedRowsStruct),
    "sizeof(Penalties)": 8 * len(PENALTY_NAMES),
    "kPenalized": PENALIZED,
    "kNoMemory": NO_MEMORY,
    "kWrongTokens": WRONG_TOKENS,
    "bits of kLargestLogit": _bits(LARGEST_LOGIT),
    "sizeof(MaskedRows)": ctypes.sizeof(structs.MaskedRowsStruct),
    "sizeof(Chance)": 8 * (NUM_LIMITS + 1),  # and the random number
    "kFew": FEW_CANDIDATES,
    "kBlock": WEIGHTS_PER_BLOCK,
    "kLowDigitBits": LOW_DIGIT_BITS,
    "bits of kMinScale": _bits(MIN_SCALE),
    "kSilu": ACTIVATIONS["silu"],
    "kGelu": ACTIVATIONS["gelu"],
    "kGeluTanh": ACTIVATIONS["gelu_tanh"],
    "kRelu": ACTIVATIONS["relu"],
    "kRelu2": ACTIVATIONS["relu2"],
    "kAsComputed": AS_COMPUTED,
    "kInt8Levels": INT8_CACHE,
    "kFp8Levels": FP8_CACHE,
    "kProductsAreRight": PRODUCTS_ARE_RIGHT,
    "kTilesNotPermitted": TILES_NOT_PERMITTED,
    "kProductsAreOff": PRODUCTS_ARE_OFF,
    "kProductsCrash": PRODUCTS_CRASH,
}
"""Values by their names in `constants` of source/decoder.cpp."""


def check_layout(library: ctypes.CDLL) -> None:
    """Raise ConfigError that lists all differences unless the library was compiled with the same constants."""
    compiled: dict[str, int] = {}
    for constant in library.constants():
        if constant.name is None:
            break
        compiled[constant.name.decode()] = constant.value
    names = sorted(compiled.keys() | _CONSTANTS.keys())
    wrong = [
        f"{name} is {compiled.get(name, 'not there')}, expected {_CONSTANTS.get(name, 'no such number')}"
        for name in names
        if compiled.get(name) != _CONSTANTS.get(name)
    ]
    if wrong:
        raise ConfigError(
            f"the compiled layers {library._name} are not those of this version: {'; '.join(wrong)}"
        )
