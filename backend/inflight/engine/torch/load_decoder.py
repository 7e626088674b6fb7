"""Which decoder computes a model: compiled code where the machine can run it, else torch's operators.

For torch's operators it also finds the attention: over KV blocks in place where a GPU's kernels can do that, else
over gathered blocks. Where int8 is asked for and no compiled code computes it, weights are rounded as the compiled
layers round them and multiplied as bfloat16: the same model, but no smaller or faster than in bfloat16. Used
by the loading thread only.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace

import torch
from torch import Tensor

from inflight.config import INT8, EngineConfig
from inflight.engine.torch.attention import BY_PRODUCTS, GATHERING, Attention
from inflight.engine.torch.attention_check import CannotAttend, check_attention
from inflight.engine.torch.collectives import Collectives
from inflight.engine.torch.cuda import torch_paged_attention
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.host_memory import Recycled
from inflight.engine.torch.native.decoder import NativeDecoder
from inflight.engine.torch.native.library import CannotBuild, load_library
from inflight.engine.torch.native.packing import PackedHead, PackedLayer, Packer, quantize
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, LayerWeights, Linear, PlainWeights, load_weights
from inflight.models.loader import Finisher, load_finished_weights, stored_dtype
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part

_log = logging.getLogger(__name__)
_MAX_GROUP, _MAX_HEAD_DIM = 12, 256  # kTile and kMaxHeadDim of native/source/attention.h
_ROWS_AT_ONCE = 4096  # of a matrix that is rounded, in float32 meanwhile


class _Packing(Finisher[PackedLayer, PackedHead]):
    """Packs everything as it is read: what is read shares memory, what is packed has its own."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._memory = Recycled()
        # int8 columns are no rows that could be looked up.
        self.keeps_tied_embedding = packer.int8

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(shape) == 1:  # kept as it was read, and with it all the memory that it shares
            return super().empty(shape, dtype, device)
        return self._memory.empty(shape, dtype)

    def layer(self, layer: LayerWeights) -> PackedLayer:
        return self._packer.layer(layer)

    def head(self, head: Linear) -> PackedHead:
        return self._packer.linear(head)


def load_decoder(
    config: EngineConfig,
    model: ModelDescription,
    device: torch.device,
    part: Part,
    windows: tuple[AttentionWindow | None, ...],
    max_sequence_length: int,
    collectives: Collectives,
) -> Decoder | NativeDecoder:
    """Read the weights of `part` into the decoder that suits; ConfigError if what is asked for cannot be had."""
    is_int8, dtype = config.dtype == INT8, _computed_dtype(config, model)
    try:
        library = _find_library(config, model.decoder, dtype, device)
    except CannotBuild as reason:
        _settle_for_torch(config, device, reason)
        weights = load_weights(model, dtype, device, part)
        if is_int8:
            weights = round_to_int8(weights)
        attention = _find_attention(config, part.held_config(model.decoder), windows, dtype, device)
        return Decoder(model.decoder, weights, windows, max_sequence_length, part, collectives, attention)
    packer = Packer(library, dtype, model.decoder.gated_mlp, is_int8, torch.get_num_threads())
    weights = load_finished_weights(model, dtype, device, part, _Packing(packer))
    return NativeDecoder(
        model.decoder,
        weights,
        packer,
        windows,
        max_sequence_length,
        config.tokens_per_block,
        part,
        collectives,
    )


def _find_attention(
    config: EngineConfig,
    held: DecoderConfig,
    windows: tuple[AttentionWindow | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Attention:
    """The first attention that computes this model correctly there: in place, gathered, or by plain products.

    On a CPU nothing is tried: gathered.
    """
    if device.type != "cuda":
        return GATHERING
    tried = held, config.tokens_per_block, windows, dtype, device
    try:
        attention = torch_paged_attention(device)
        check_attention(attention, *tried)
        return attention
    except CannotAttend as reason:
        _log.warning(
            "KV blocks are copied together before they are read, which is slower, and generation runs without "
            "CUDA graphs; torch's attention over %s blocks of %d tokens is of no use here: %s",
            str(dtype).removeprefix("torch."),
            config.tokens_per_block,
            reason,
        )
    try:
        check_attention(GATHERING, *tried)
        return GATHERING
    except CannotAttend as reason:
        _log.warning(
            "attention is computed by plain matrix products, which is slower still: torch's scaled dot product "
            "attention of %s cannot be trusted on this device: %s",
            str(dtype).removeprefix("torch."),
            reason,
        )
        return BY_PRODUCTS


def _computed_dtype(config: EngineConfig, model: ModelDescription) -> torch.dtype:
    """The dtype of activations and KV cache, and of weights unless they are int8."""
    if config.dtype is None:
        return stored_dtype(model)
    return torch.bfloat16 if config.dtype == INT8 else getattr(torch, config.dtype)


def _find_library(
    config: EngineConfig, decoder: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> ctypes.CDLL:
    """The compiled code; CannotBuild where torch's operators are asked for or have to do."""
    if config.kernels == "torch":
        raise CannotBuild("kernels is torch")
    if device.type != "cpu":
        raise CannotBuild(f"it is for CPUs, and the device is {device.type}")
    _check_sizes(decoder, config.tokens_per_block, dtype)
    return load_library(str(dtype).removeprefix("torch."), config.dtype == INT8)


def _check_sizes(decoder: DecoderConfig, tokens_per_block: int, dtype: torch.dtype) -> None:
    """CannotBuild for sizes that the compiled attention has no room for; bfloat16 it multiplies in pairs."""
    group = decoder.num_heads // decoder.num_kv_heads
    if group > _MAX_GROUP:
        raise CannotBuild(f"it takes {_MAX_GROUP} query heads for a key head, and the model has {group}")
    if decoder.head_dim > _MAX_HEAD_DIM:
        raise CannotBuild(f"it takes heads of {_MAX_HEAD_DIM}, and the model's are of {decoder.head_dim}")
    for name, size in (("head_dim", decoder.head_dim), ("tokens_per_block", tokens_per_block)):
        if dtype is torch.bfloat16 and size % 2:
            raise CannotBuild(f"in bfloat16 it takes even numbers, and {name} is {size}")


def _settle_for_torch(config: EngineConfig, device: torch.device, reason: CannotBuild) -> None:
    """Say why, and what is lost by it if it was not asked for; ConfigError if compiled code was.

    The log gets the reason as text: a record that is kept would keep the exception, and with it the engine.
    """
    if config.kernels == "native":
        raise ConfigError(f"kernels is native, but there is no compiled code: {reason}") from reason
    if config.dtype == INT8:
        _log.warning(
            "dtype is int8, but only compiled code multiplies int8: weights are rounded to int8 and multiplied as "
            "bfloat16 on torch's operators, which is no faster than bfloat16: %s",
            str(reason),
        )
    elif config.kernels is None and device.type == "cpu":
        _log.warning(
            "the layers run on torch's operators, which are slower than compiled code: %s", str(reason)
        )
    else:
        _log.info("the layers run on torch's operators: %s", str(reason))


def round_to_int8(weights: PlainWeights) -> PlainWeights:
    """Every linear layer's matrix rounded to int8 with a scale for each row, the layers' in place.

    Embeddings and norms stay as they are, an embedding that is the output projection's matrix too.
    """
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.up, layer.down):
            _round(linear.weight, linear.weight)
    if weights.lm_head is None:
        return weights
    rounded = torch.empty_like(weights.lm_head.weight)
    _round(weights.lm_head.weight, rounded)
    return replace(weights, lm_head=Linear(rounded, weights.lm_head.bias))


def _round(weight: Tensor, target: Tensor) -> None:
    for rows, result in zip(weight.split(_ROWS_AT_ONCE), target.split(_ROWS_AT_ONCE), strict=True):
        levels, scales = quantize(rows)
        result.copy_(levels * scales[:, None])
