"""Which decoder computes a model: compiled code where the machine can run it, else torch's operators."""

from __future__ import annotations

import logging

import torch

from inflight.engine.torch.collectives import Collectives
from inflight.engine.torch.config import INT8, TorchEngineConfig
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.native.decoder import NativeDecoder
from inflight.engine.torch.native.library import CannotBuild, load_library
from inflight.engine.torch.native.packing import Packer
from inflight.engine.torch.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import load_weights
from inflight.models.loader import stored_dtype
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part

_log = logging.getLogger(__name__)


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
    dtype = getattr(torch, config.dtype) if config.dtype not in (None, INT8) else None
    packer = _find_packer(config, model, dtype, device)
    if packer is None:
        weights = load_weights(model, dtype, device, part)
        return Decoder(model.decoder, weights, windows, max_sequence_length, part, collectives)
    weights = load_weights(model, packer.dtype, device, part, packer.layer)
    return NativeDecoder(model.decoder, weights, packer, windows, max_sequence_length, part, collectives)


def _find_packer(
    config: TorchEngineConfig, model: ModelDescription, dtype: torch.dtype | None, device: torch.device
) -> Packer | None:
    """None: torch's operators have to do, and the log says why."""
    is_int8 = config.dtype == INT8
    if config.kernels == "torch" and not is_int8:
        return None
    try:
        if config.kernels == "torch":
            raise CannotBuild("kernels is torch")
        if device.type != "cpu":
            raise CannotBuild(f"it is for CPUs, and the device is {device.type}")
        used = torch.bfloat16 if is_int8 else dtype or stored_dtype(model)
        library = load_library(str(used).removeprefix("torch."), is_int8)
    except CannotBuild as error:
        if is_int8:
            raise ConfigError(f"dtype is int8, which only the compiled code computes: {error}") from error
        if config.kernels == "native":
            raise ConfigError(f"kernels is native, but there is no compiled code: {error}") from error
        if device.type == "cpu":
            _log.warning(
                "the layers run on torch's operators, which are slower than compiled code: %s", error
            )
        return None
    return Packer(library, used, model.decoder.gated_mlp, is_int8, torch.get_num_threads())
