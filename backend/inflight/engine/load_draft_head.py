"""Loads a model's draft head: compiled like the model's layers, or for torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from inflight.config import EngineConfig
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.library import CannotBuild
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.draft_head import DraftHead, MtpHead, head_window, make_layer
from inflight.engine.layers.eagle_head import EagleHead
from inflight.engine.layers.gemma4_head import Gemma4Head
from inflight.engine.layers.torch_sink import TorchSink
from inflight.engine.load_decoder import check_native, keeps_levels, kept_by_compiled_layers
from inflight.engine.memory import LESS_WEIGHTS, allocating
from inflight.models.decoder_weights import DraftHeadWeights, LayerT, LinearT
from inflight.models.eagle_weights import EagleWeights, eagle_bytes, eagle_part, load_eagle_weights
from inflight.models.gemma4_weights import gemma4_head_bytes, gemma4_part, load_gemma4_head
from inflight.models.loader import draft_head_bytes, load_mtp_weights
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels, Sink

MakeDraftHead = Callable[[KvCache], DraftHead]
"""Makes a draft head with the KV cache, which is allocated after all weights are read."""


def load_draft_head(
    config: EngineConfig,
    model: ModelDescription,
    decoder: Decoder | NativeDecoder,
    device: torch.device,
) -> MakeDraftHead:
    """Read a rank's part of the draft head of a model that has one.

    Args:
        config: The model and its parameters.
        model: The description with the draft head.
        decoder: The model's decoder on this rank.
        device: Device of the weights.

    Raises:
        ConfigError: Files of the head are damaged, or there is no memory.
    """
    shard, window = decoder.part.shard, head_window(decoder)
    sink = TorchSink(decoder.dtype, device, config.dtype)
    if (head := model.decoder.gemma4_head) is not None and model.gemma4_head is not None:
        num_bytes = partial(gemma4_head_bytes, model, decoder.dtype, shard)
        with allocating("the draft head", num_bytes, device, LESS_WEIGHTS):
            weights = load_gemma4_head(sink, model, decoder.dtype, device, shard)
        read_kv = decoder.part.read_kv_of(head, model.decoder)
        head = replace(head, layers=replace(head.layers, read_kv=read_kv))
        return partial(Gemma4Head, decoder, head, gemma4_part(model.gemma4_head, shard), weights)
    # The checkpoint's own head has the model's embedding and output projection.
    part = Part(shard, (0, 1), is_first_stage=False, is_last_stage=False)
    if isinstance(decoder, NativeDecoder) and _is_compiled(config, model, decoder, device):
        if model.eagle is not None:
            eagle = _read_eagle(decoder.packer, model, model.eagle, decoder, device)
            layer = decoder.draft_layer(eagle.decoder, window, eagle_part(shard))
            return partial(EagleHead, decoder, layer, layer.linear(eagle.fusion), eagle)
        kept = KeptLevels() if kept_by_compiled_layers(config, model, device) else None
        mtp = _read_mtp(decoder.packer, model, decoder, device, kept)
        layer = decoder.draft_layer(mtp.decoder, window, part)
        return partial(MtpHead, decoder, layer, layer.linear(mtp.projection), mtp)
    if model.eagle is not None:
        eagle = _read_eagle(sink, model, model.eagle, decoder, device)
        return partial(
            EagleHead, decoder, make_layer(decoder, eagle.decoder, eagle_part(shard)), eagle.fusion, eagle
        )
    kept = KeptLevels() if keeps_levels(config, model, device) else None
    mtp = _read_mtp(sink, model, decoder, device, kept)
    return partial(MtpHead, decoder, make_layer(decoder, mtp.decoder, part), mtp.projection, mtp)


def _is_compiled(
    config: EngineConfig, model: ModelDescription, decoder: NativeDecoder, device: torch.device
) -> bool:
    """Whether compiled layers have what the head's layer needs."""
    try:
        check_native(config, model.decoder.draft_layer, decoder.dtype, device, decoder.part.shard)
    except CannotBuild:
        return False
    return True


def _read_eagle(
    sink: Sink[LayerT, LinearT],
    model: ModelDescription,
    head: ModelDescription,
    decoder: Decoder | NativeDecoder,
    device: torch.device,
) -> EagleWeights[LayerT, LinearT]:
    dtype, shard = decoder.dtype, decoder.part.shard
    with allocating("the EAGLE-3 head", partial(eagle_bytes, head, dtype, shard), device, LESS_WEIGHTS):
        return load_eagle_weights(sink, head, model.decoder.vocab_size, dtype, device, shard)


def _read_mtp(
    sink: Sink[LayerT, LinearT],
    model: ModelDescription,
    decoder: Decoder | NativeDecoder,
    device: torch.device,
    kept: KeptLevels | None,
) -> DraftHeadWeights[LayerT, LinearT]:
    num_bytes = partial(draft_head_bytes, model, decoder.dtype, decoder.part)
    with allocating("the draft head", num_bytes, device, LESS_WEIGHTS):
        return load_mtp_weights(sink, model, decoder.dtype, device, decoder.part, kept)
