"""Which decoder computes a model: compiled code where the machine can run it, else torch's operators."""

from __future__ import annotations

import ctypes
import logging

import torch

from inflight.engine.torch.collectives import Collectives
from inflight.engine.torch.config import INT8, TorchEngineConfig
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.int8_weights import round_to_int8
from inflight.engine.torch.native.decoder import NativeDecoder
from inflight.engine.torch.native.library import CannotBuild, load_library
from inflight.engine.torch.native.packing import Packer
from inflight.engine.torch.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, load_weights
from inflight.models.loader import stored_dtype
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part

_log = logging.getLogger(__name__)
_MAX_GROUP, _MAX_HEAD_DIM = 12, 256  # kTile and kMaxHeadDim of native/source/attention.h


def load_decoder(
    config: TorchEngineConfig,
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
        return Decoder(model.decoder, weights, windows, max_sequence_length, part, collectives)
    packer = Packer(library, dtype, model.decoder.gated_mlp, is_int8, torch.get_num_threads())
    weights = load_weights(model, dtype, device, part, packer.layer)
    return NativeDecoder(model.decoder, weights, packer, windows, max_sequence_length, part, collectives)


def _computed_dtype(config: TorchEngineConfig, model: ModelDescription) -> torch.dtype:
    """Of activations and KV cache, and of weights unless they are int8."""
    if config.dtype is None:
        return stored_dtype(model)
    return torch.bfloat16 if config.dtype == INT8 else getattr(torch, config.dtype)


def _find_library(
    config: TorchEngineConfig, decoder: DecoderConfig, dtype: torch.dtype, device: torch.device
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


def _settle_for_torch(config: TorchEngineConfig, device: torch.device, reason: CannotBuild) -> None:
    """Say what is lost by it, if anything; ConfigError if compiled code was asked for."""
    if config.kernels == "native":
        raise ConfigError(f"kernels is native, but there is no compiled code: {reason}") from reason
    if config.dtype == INT8:
        _log.warning(
            "dtype is int8, but only compiled code multiplies int8: weights are rounded to int8 and multiplied as "
            "bfloat16 on torch's operators, which is no faster than bfloat16: %s",
            reason,
        )
    elif config.kernels is None and device.type == "cpu":
        _log.warning("the layers run on torch's operators, which are slower than compiled code: %s", reason)
