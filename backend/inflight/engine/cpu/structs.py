"""The interface of the compiled code: the structs of source/layer.h, latent.h, experts.h, penalties.h and masks.h,
with the same fields, and the functions' signatures.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_int64, c_void_p


class LinearStruct(Structure):
    """A linear layer with its packed matrix; layout of `Linear` in source/layer.h."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("corrections", c_void_p),
        ("order", c_void_p),
        ("columns", c_int32),
        ("inner", c_int32),
        ("kind", c_int32),
        ("groups", c_int32),
        ("group_size", c_int32),
    )


class NormStruct(Structure):
    """Weight and bias of a norm, either of which may be null; layout of `Norm` in source/layer.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class RecurrentShapeStruct(Structure):
    """Sizes of a model's recurrent layers; values of `kind` are constants of `layout.py`."""

    _fields_ = (
        ("kind", c_int32),
        ("key_heads", c_int32),
        ("heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("conv_width", c_int32),
        ("conv_columns", c_int32),
        ("projected", c_int32),
        ("output", c_int32),
        ("eps", c_float),
        ("beta_scale", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
    )


class RecurrentStruct(Structure):
    """A recurrent layer's weights other than projections, and the address of its states."""

    _fields_ = (
        ("conv", c_void_p),
        ("conv_bias", c_void_p),
        ("decay", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("conv_states", c_void_p),
        ("states", c_void_p),
    )


class LatentLayerStruct(Structure):
    """A layer's weights of latent attention other than the first and last projections; see source/layer.h."""

    _fields_ = (
        ("query_norm", NormStruct),
        ("kv_norm", NormStruct),
        ("query_up", LinearStruct),
        ("absorb", LinearStruct),
        ("value_up", LinearStruct),
        ("kv_up", LinearStruct),
    )


class LayerStruct(Structure):
    """A layer and its part of the KV cache or of the recurrent states."""

    _fields_ = (
        ("attention_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("attention_post_norm", NormStruct),
        ("mlp_post_norm", NormStruct),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("router", LinearStruct),
        ("expert_up", LinearStruct),
        ("expert_down", LinearStruct),
        ("choice_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("learned_sinks", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_factors", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("recurrent", RecurrentStruct),
        ("recent", c_int32),
        ("sinks", c_int32),
        ("first", c_int32),
        ("is_bidirectional", c_int32),
        ("latent", LatentLayerStruct),
    )


class LatentShapeStruct(Structure):
    """Sizes of multi-head latent attention, as compiled code reads them."""

    _fields_ = (
        ("query_rank", c_int32),
        ("rank", c_int32),
        ("nope", c_int32),
        ("rope", c_int32),
        ("value", c_int32),
        ("is_interleaved", c_int32),
        ("eps", c_float),
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
        ("rotary_dim", c_int32),
        ("norms_heads_together", c_int32),
        ("norms_rotated", c_int32),
        ("is_parallel", c_int32),
        ("experts", c_int32),
        ("experts_per_row", c_int32),
        ("expert_inner", c_int32),
        ("shared_inner", c_int32),
        ("normalizes_chances", c_int32),
        ("scores_by_sigmoid", c_int32),
        ("groups", c_int32),
        ("groups_per_row", c_int32),
        ("scores_per_group", c_int32),
        ("cache_kind", c_int32),
        ("spin_us", c_int32),
        ("gates_attention", c_int32),
        ("widest_operand", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_soft_cap", c_float),
        ("residual_scale", c_float),
        ("logits_scale", c_float),
        ("logits_soft_cap", c_float),
        ("chances_scale", c_float),
        ("swiglu_limit", c_float),
        ("swiglu_alpha", c_float),
        ("latent", c_void_p),
        ("recurrent", RecurrentShapeStruct),
    )


class LowRankStruct(Structure):
    """An adapter's low-rank matrices for a product."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("ranges", c_void_p),
        ("magnitude", c_void_p),
        ("ranks", c_int32),
    )


class LayerAdapterStruct(Structure):
    """An adapter's low-rank matrices for a layer."""

    _fields_ = (
        ("qkv", LowRankStruct),
        ("query_up", LowRankStruct),
        ("output", LowRankStruct),
        ("recurrent_input", LowRankStruct),
        ("recurrent_output", LowRankStruct),
        ("up", LowRankStruct),
        ("down", LowRankStruct),
    )


class AdapterStruct(Structure):
    """A LoRA adapter: its matrices for every layer, and the largest LoRA rank of its matrices."""

    _fields_ = (("layers", c_void_p), ("ranks", c_int32))


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
        ("adapters", c_void_p),
        ("num_segments", c_int64),
        ("segments", c_void_p),
        ("kept", c_void_p),
        ("num_kept", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("ends", c_void_p),
        ("read", c_void_p),
    )


class RoutedStruct(Structure):
    """Totals over all layers with experts since the decoder was created: see `Routed` in source/experts.h."""

    _fields_ = (("ns", c_int64), ("experts", c_int64))


class PenalizedRowsStruct(Structure):
    """Rows of logits to which penalties are applied."""

    _fields_ = (
        ("count", c_int64),
        ("rows", c_void_p),
        ("penalties", c_void_p),
        ("history", c_void_p),
        ("history_width", c_int64),
        ("slots", c_void_p),
        ("lengths", c_void_p),
    )


class MaskedRowsStruct(Structure):
    """Rows of logits to which masks are applied."""

    _fields_ = (("count", c_int64), ("rows", c_void_p), ("masks", c_void_p), ("pieces", c_int64))


class ConstantStruct(Structure):
    """A constant of the weight layout; the last one in an array has no name."""

    _fields_ = (("name", c_char_p), ("value", c_int64))


_SIGNATURES = {
    "check_products": (c_int32, ()),
    "constants": (POINTER(ConstantStruct), ()),
    "create": (c_void_p, (POINTER(ShapeStruct), POINTER(LayerStruct), c_void_p)),
    "destroy": (None, (c_void_p,)),
    "prepare": (c_bool, (c_void_p, POINTER(BatchStruct), c_void_p, c_int64)),
    "run": (c_bool, (c_void_p, POINTER(BatchStruct), c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "accept": (c_bool, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32)),
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
    "product": (c_bool, (c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_int32, c_void_p)),
    "find_peaks": (None, (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    "apply_masks": (None, (c_void_p, c_void_p, c_int32, POINTER(MaskedRowsStruct), c_void_p)),
    "penalize": (c_int32, (c_void_p, c_void_p, c_int32, POINTER(PenalizedRowsStruct))),
    "draw": (c_bool, (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    "read_routed": (None, (c_void_p, POINTER(RoutedStruct))),
    "unpack_rows": (None, (c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_void_p)),
    "pack": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "pack_int8": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "pack_groups": (
        None,
        (c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int32),
    ),
    "pack_a": (None, (c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p)),
    "pack_b": (None, (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_void_p)),
    "quantize": (None, (c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int32)),
}


def declare(library: ctypes.CDLL) -> None:
    """Set the signature of every function in the library; source/decoder.cpp documents the functions."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class Handle:
    """A decoder in the compiled code, which is destroyed with this object.

    Args:
        library: The compiled code.
        shape: The decoder's sizes.
        layers: Its layers.
        other: A decoder that shares its threads with this one; the two never run at the same time. None: this one
            has its own threads.

    Attributes:
        exists: Whether the decoder's threads could be started.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: ShapeStruct,
        layers: ctypes.Array[LayerStruct],
        other: Handle | None = None,
    ) -> None:
        self._library = library
        self._layers = layers  # the decoder points to it
        self._other = other  # lives as long as this one
        self._as_parameter_ = library.create(shape, layers, other)
        self.exists = self._as_parameter_ is not None

    def __del__(self) -> None:
        if getattr(self, "_as_parameter_", None) is not None:
            self._library.destroy(self._as_parameter_)
