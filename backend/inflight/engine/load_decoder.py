"""Chooses the decoder that computes a model, and reads the weights into it.

It is compiled code if the machine supports that, else torch's operators. If int8 or fp8 is configured and no
compiled code computes it, weights are quantized as they are read (`layers/torch_sink.py`). Loading thread.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from inflight.config import FP8, INT8, MMAP, QUANTIZED, EngineConfig
from inflight.engine.attention.find import find_attention, find_picture_attention
from inflight.engine.collectives import Collectives
from inflight.engine.components import only_by_torch
from inflight.engine.cpu import packing
from inflight.engine.cpu.decoder import RECURRENT_KINDS, NativeDecoder
from inflight.engine.cpu.layout import MAX_CONV_WIDTH, MAX_HEAD_DIM, MAX_QUERY_GROUP
from inflight.engine.cpu.library import CannotBuild, CompiledCode, find_target, load_library
from inflight.engine.cpu.packed_file import Mapped, PackedFile
from inflight.engine.cpu.packing import PackedLayer, PackedLinear, Packer
from inflight.engine.cuda.row_kernels import find_row_kernels
from inflight.engine.host_memory import Arena
from inflight.engine.kv_quantization import find_kv_quantization
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.layer_check import find_operations
from inflight.engine.layers.torch_sink import load_weights
from inflight.engine.layers.transformers_decoder import TransformersDecoder, TransformersModel
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.extras import how_to_install
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import DecoderWeights, PlainWeights
from inflight.models.draft_folder import with_wanted_head
from inflight.models.eagle_weights import eagle_bytes
from inflight.models.gemma4_weights import gemma4_head_bytes
from inflight.models.levels import MatrixKind
from inflight.models.loader import load_weights_into, num_weight_bytes, quantized_kinds, stored_dtype
from inflight.models.recurrent import Mamba2
from inflight.models.registry import (
    ModelDescription,
    UnknownFamily,
    read_model_description,
)
from inflight.models.sharding import WHOLE, Part, Shard
from inflight.models.sink import KeptLevels

_log = logging.getLogger(__name__)
_INSTALL = how_to_install("transformers")

T = TypeVar("T")
AnyDecoder = Decoder | NativeDecoder | TransformersDecoder


def find_model(
    config: EngineConfig, device: torch.device, num_ranks: int
) -> ModelDescription | TransformersModel:
    """Return the checkpoint's description, or the loaded model if transformers' own code is to run it.

    Transformers' code runs it if the parameter `engine` is transformers, or if the parameter is unset and the
    family is not implemented here.

    Raises:
        ConfigError: The configured engine, or if none is configured neither engine, can use the checkpoint; or
            it needs a draft head and has none.
    """
    path = str(config.gpt_model_path)
    is_installed = importlib.util.find_spec("transformers") is not None
    if config.implementation != "transformers":
        try:
            model = read_model_description(path)
            return with_wanted_head(model, config.draft_head_dir, config.has_draft_head)
        except UnknownFamily as error:
            if config.implementation == "torch" or config.drafts:
                raise
            if not is_installed:
                raise ConfigError(f"{error}; transformers' own code may run it: {_INSTALL}") from error
            _log.warning(
                "%s is not implemented here: transformers' own code runs it, which is slower (%s)",
                error.family,
                path,
            )
    if not is_installed:
        raise ConfigError(f"engine is transformers, which is not installed: {_INSTALL}")
    from inflight.engine.layers.transformers_model import load_transformers_model  # imports transformers

    return load_transformers_model(config, device, num_ranks)


def load_decoder(
    config: EngineConfig,
    model: ModelDescription | TransformersModel,
    device: torch.device,
    part: Part,
    windows: tuple[AttentionWindow | None, ...],
    max_sequence_length: int,
    collectives: Collectives,
) -> AnyDecoder:
    """Read the weights of `part` into the decoder for this configuration; raises ConfigError if there is none."""
    if isinstance(model, TransformersModel):
        return _take_transformers(config, model, device, windows)
    has_levels = bool(kept_by_compiled_layers(config, model, device))
    computed = torch.bfloat16 if has_levels else computed_dtype(config, model)
    is_int8 = config.dtype == INT8
    try:
        library = _find_library(config, model.decoder, computed, device, part.shard, is_int8 or has_levels)
    except CannotBuild as reason:
        _log_or_refuse_fallback(config, device, reason)
        log_not_mapped(config, "the layers run on torch's operators")
        return _load_torch_decoder(config, model, device, part, windows, max_sequence_length, collectives)
    num_threads = torch.get_num_threads()
    packer = Packer(
        library, computed, is_int8, num_threads, is_int8 or has_levels, latent=model.decoder.latent
    )
    packed = _load_packed(config, model, device, part, packer, has_levels)
    return NativeDecoder(
        model.decoder,
        packed.content,
        packer,
        windows,
        max_sequence_length,
        config.tokens_per_block,
        part,
        collectives,
        find_kv_quantization(config.kv_cache_dtype),
        packed.num_bytes,
    )


def _load_torch_decoder(
    config: EngineConfig,
    model: ModelDescription,
    device: torch.device,
    part: Part,
    windows: tuple[AttentionWindow | None, ...],
    max_sequence_length: int,
    collectives: Collectives,
) -> Decoder:
    """Read the weights of `part` into a decoder on torch's operators."""
    dtype, held = computed_dtype(config, model), part.held_config(model.decoder)
    return Decoder(
        model.decoder,
        _load_for_torch(config, model, dtype, device, part),
        windows,
        max_sequence_length,
        part,
        collectives,
        find_attention(config, held, windows, dtype, device),
        find_operations(held, dtype, device, find_kv_quantization(config.kv_cache_dtype)),
        find_row_kernels(model.decoder.vocab_size, device),
        find_picture_attention(config, held, windows, dtype, device),
    )


def _load_packed(
    config: EngineConfig,
    model: ModelDescription,
    device: torch.device,
    part: Part,
    packer: Packer,
    has_levels: bool,
) -> Mapped[DecoderWeights[PackedLayer, PackedLinear]]:
    """Read the weights of `part` for compiled layers.

    `has_levels`: whether the checkpoint has quantized matrices that they multiply unchanged.
    """
    computed = packer.dtype
    if not has_levels:
        _log_unpacked(config, model, computed, "compiled layers do not multiply them as they are")

    def pack(arena: Arena) -> tuple[DecoderWeights[PackedLayer, PackedLinear], KeptLevels | None]:
        packer.arena, levels = arena, KeptLevels() if has_levels else None
        weights = load_weights_into(packer, model, computed, device, part, levels)
        packer.arena = Arena()  # the previous arena may be in a file, which is complete now
        return weights, levels

    layout = (packer.library.description, computed, config.dtype == INT8, packer.has_int8_head, part)
    packed = _map_or_pack(config, model, layout, pack)
    weights, levels = packed.content
    if levels is not None:
        _log.info(
            "quantized projections keep the checkpoint's format (%s) and round their inputs to int8; the output "
            "projection %s; --dtype bfloat16 unpacks the weights and avoids rounding",
            levels,
            "keeps it too" if levels.heads else "is int8 by row",
        )
        levels.warn(_log, f" to {str(computed).removeprefix('torch.')}")
    return Mapped(weights, packed.num_bytes)


def _map_or_pack(
    config: EngineConfig, model: ModelDescription, layout: tuple[object, ...], pack: Callable[[Arena], T]
) -> Mapped[T]:
    """Return the packed weights, mapped from a file if `weights` is mmap and there is a cache folder."""
    if config.weights == MMAP:
        file = PackedFile.of(model.folder, *layout)
        if file is not None:
            return file.load(pack)
        _log.warning("weights is mmap, but there is no folder for the file: see XDG_CACHE_HOME")
    return Mapped(pack(Arena()))


def _load_for_torch(
    config: EngineConfig, model: ModelDescription, dtype: torch.dtype, device: torch.device, part: Part
) -> PlainWeights:
    """Read the weights of `part` for torch's operators; quantized if the configuration asks for it, or as in the
    checkpoint."""
    levels = KeptLevels() if keeps_levels(config, model, device) else None
    if levels is None:
        _log_unpacked(config, model, dtype, "torch's operators would unpack them for every product")
    weights = load_weights(model, dtype, device, part, config.dtype, levels)
    if levels is not None:
        _log.info("quantized projections keep the checkpoint's format (%s); --dtype unpacks them", levels)
        levels.warn(_log)
    return weights


def _take_transformers(
    config: EngineConfig,
    model: TransformersModel,
    device: torch.device,
    windows: tuple[AttentionWindow | None, ...],
) -> TransformersDecoder:
    from inflight.engine.layers.transformers_model import check_decoder

    log_not_mapped(config, "transformers' own code runs the layers")
    attention = find_attention(config, model.decoder, windows, model.dtype, device)
    check_decoder(model, attention, config)
    return TransformersDecoder(model, windows, attention)


def log_not_mapped(config: EngineConfig, reason: str) -> None:
    """Log that the parameter `weights` has no effect, if it asks for mapped weights."""
    if config.weights == MMAP:
        _log.warning("weights is mmap, which has no effect here: %s", reason)


def computed_dtype(config: EngineConfig, model: ModelDescription) -> torch.dtype:
    """Return the data type of activations and KV cache, and of weights that are not quantized."""
    if config.dtype is None:
        return stored_dtype(model)
    return torch.bfloat16 if config.dtype in QUANTIZED else getattr(torch, config.dtype)


def kept_by_compiled_layers(
    config: EngineConfig, model: ModelDescription, device: torch.device
) -> frozenset[MatrixKind]:
    """Return the kinds of quantized matrices in the checkpoint that compiled layers multiply unchanged, in
    bfloat16.

    Empty if a dtype is configured, or if the checkpoint's own dtype is float32: then matrices are unpacked.
    """
    if device.type != "cpu" or not _has_own_dtype(config, model):
        return frozenset()
    return packing.KEPT & quantized_kinds(model).keys()


def keeps_levels(config: EngineConfig, model: ModelDescription, device: torch.device) -> bool:
    """Whether torch's operators keep quantized matrices: on a GPU, or if `kernels` is torch.

    On a CPU unpacking a matrix takes longer than multiplying with it, so keeping levels saves memory only. It
    matters most for 4-bit floats: a model's experts use them, and would take four times as much memory in 16
    bits.
    """
    if not _has_own_dtype(config, model):
        return False
    is_asked_for = config.kernels == "torch" or device.type == "cuda"
    return is_asked_for or MatrixKind.FLOAT4 in quantized_kinds(model)


def kept_kinds(
    config: EngineConfig, model: ModelDescription, device: torch.device, shard: Shard = WHOLE
) -> frozenset[MatrixKind]:
    """Return the kinds of matrices that stay quantized as in the checkpoint, unless compiled code cannot be
    compiled."""
    return _find_kinds(config, model, device, shard)[0]


def weight_bytes(config: EngineConfig, model: ModelDescription, device: torch.device, part: Part) -> int:
    """Return the memory that a rank's weights will take in bytes, unless compiled code cannot be compiled."""
    kinds, is_compiled = _find_kinds(config, model, device, part.shard)
    dtype, head_dtype = computed_dtype(config, model), torch.int8 if kinds and is_compiled else None
    linear_dtype = torch.int8 if config.dtype in QUANTIZED else dtype
    of_folder = 0 if model.eagle is None else eagle_bytes(model.eagle, dtype, part.shard)
    if model.gemma4_head is not None:
        of_folder = gemma4_head_bytes(model, dtype, part.shard)
    return num_weight_bytes(model, dtype, linear_dtype, kinds, part, head_dtype) + of_folder


def _find_kinds(
    config: EngineConfig, model: ModelDescription, device: torch.device, shard: Shard
) -> tuple[frozenset[MatrixKind], bool]:
    """Return the result of `kept_kinds`, and whether compiled code runs the layers."""
    kinds = kept_by_compiled_layers(config, model, device)
    if _runs_compiled(config, model, device, shard, kinds):
        return kinds, True
    return frozenset(quantized_kinds(model)) if keeps_levels(config, model, device) else frozenset(), False


def _has_own_dtype(config: EngineConfig, model: ModelDescription) -> bool:
    """Whether a quantized checkpoint stays quantized. Its weights are unpacked if a dtype is configured, or
    if its own dtype is float32."""
    is_quantized = config.dtype is None and model.quantization is not None
    return is_quantized and stored_dtype(model) is not torch.float32


def _log_unpacked(config: EngineConfig, model: ModelDescription, dtype: torch.dtype, otherwise: str) -> None:
    """Log that quantized matrices are unpacked, if there are any; `otherwise` is the reason unless a parameter or
    the checkpoint's dtype is."""
    kinds = quantized_kinds(model)
    if not kinds:
        return
    of_kinds = " and ".join(f"{count} in {kind.value}" for kind, count in kinds.items())
    reason = otherwise
    if config.dtype is not None:
        rounds = ", which rounds them again, by rows" if config.dtype in QUANTIZED else ""
        reason = f"dtype is {config.dtype}{rounds}"
    elif dtype is torch.float32:
        reason = "that is the checkpoint's own dtype"
    short = str(dtype).removeprefix("torch.")
    _log.info("quantized matrices (%s) are unpacked to %s: %s", of_kinds, short, reason)


def _find_library(
    config: EngineConfig,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    int8: bool,
) -> CompiledCode:
    """Return the compiled code; raises CannotBuild if torch's operators are configured or must be used."""
    check_native(config, decoder, dtype, device, shard)
    is_quantized = find_kv_quantization(config.kv_cache_dtype) is not None
    library = load_library(str(dtype).removeprefix("torch."), int8, is_quantized)
    _log.info("the layers run on compiled code for %s", library.description)
    return library


def check_native(
    config: EngineConfig,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> None:
    """Raise CannotBuild if compiled code does not support this model or is not configured, on any machine.

    `shard`: the rank's part of each layer.
    """
    if config.kernels == "torch":
        raise CannotBuild("kernels is torch")
    if config.dtype == FP8:
        raise CannotBuild("compiled layers do not support fp8")
    if device.type != "cpu":
        raise CannotBuild(f"compiled layers run on CPUs only; the device is {device.type}")
    _check_components(decoder, shard)
    if decoder.latent is not None and find_kv_quantization(config.kv_cache_dtype) is not None:
        raise CannotBuild("compiled layers do not round the cache of latent attention")
    _check_sizes(decoder, config.tokens_per_block, dtype)


def runs_compiled(
    config: EngineConfig, model: ModelDescription, device: torch.device, shard: Shard = WHOLE
) -> bool:
    """Whether compiled code will run the layers, unless it cannot be compiled."""
    return _runs_compiled(config, model, device, shard, kept_by_compiled_layers(config, model, device))


def _runs_compiled(
    config: EngineConfig,
    model: ModelDescription,
    device: torch.device,
    shard: Shard,
    kinds: frozenset[MatrixKind],
) -> bool:
    """Whether compiled code will run the layers; `kinds` is the result of `kept_by_compiled_layers`."""
    computed = torch.bfloat16 if kinds else computed_dtype(config, model)
    try:
        check_native(config, model.decoder, computed, device, shard)
        find_target(str(computed).removeprefix("torch."), config.dtype == INT8 or bool(kinds))
    except CannotBuild:
        return False
    return True


def _check_components(decoder: DecoderConfig, shard: Shard) -> None:
    """Raise CannotBuild for components that the compiled layers do not have."""
    experts, recurrent = decoder.experts, decoder.recurrent
    lacking = {
        **only_by_torch(decoder),
        "attention and experts beside each other": decoder.parallel_residual and experts is not None,
        "norms over all heads together on several ranks": decoder.qk_norm == "projection" and shard.size > 1,
        "expert parallelism": shard.moe_ep_size > 1,
        f"recurrent layers of type {type(recurrent).__name__}": recurrent is not None
        and type(recurrent) not in RECURRENT_KINDS,
        "norms over a group of heads on several ranks": isinstance(recurrent, Mamba2)
        and recurrent.num_groups == 1
        and shard.size > 1,
        f"convolutions over more than {MAX_CONV_WIDTH} tokens": recurrent is not None
        and recurrent.conv_width > MAX_CONV_WIDTH,
    }
    if missing := [what for what, is_needed in lacking.items() if is_needed]:
        raise CannotBuild(f"compiled layers lack what this model needs: {', '.join(missing)}")


def _check_sizes(decoder: DecoderConfig, tokens_per_block: int, dtype: torch.dtype) -> None:
    """Raise CannotBuild for sizes that the compiled attention does not support; in bfloat16 it multiplies
    pairs."""
    if decoder.latent is not None:
        if decoder.latent.rope_head_dim > MAX_HEAD_DIM:
            raise CannotBuild(
                f"compiled layers support shared keys of up to {MAX_HEAD_DIM} columns; this model's have "
                f"{decoder.latent.rope_head_dim}"
            )
        return
    group = decoder.num_heads // decoder.num_kv_heads
    if group > MAX_QUERY_GROUP:
        raise CannotBuild(
            f"compiled layers support up to {MAX_QUERY_GROUP} query heads per key head; this model has {group}"
        )
    if decoder.head_dim > MAX_HEAD_DIM:
        raise CannotBuild(
            f"compiled layers support head_dim up to {MAX_HEAD_DIM}; this model has {decoder.head_dim}"
        )
    for name, size in (("head_dim", decoder.head_dim), ("tokens_per_block", tokens_per_block)):
        if dtype is torch.bfloat16 and size % 2:
            raise CannotBuild(f"in bfloat16, compiled layers need an even {name}; it is {size}")


def _log_or_refuse_fallback(config: EngineConfig, device: torch.device, reason: CannotBuild) -> None:
    """Log that torch's operators are used, and at what cost; raise ConfigError if compiled code was configured.

    The log gets the reason as text: a stored log record would keep the exception alive, and the engine with it.
    """
    if config.kernels == "native":
        raise ConfigError(f"kernels is native, but there is no compiled code: {reason}") from reason
    if config.dtype in QUANTIZED and device.type == "cpu":
        _log.warning(
            "dtype is %s, which torch's operators multiply: on a CPU that is half the memory of bfloat16, but "
            "slower than int8 by compiled code: %s",
            config.dtype,
            str(reason),
        )
    elif config.kernels is None and device.type == "cpu":
        _log.warning(
            "the layers run on torch's operators, which are slower than compiled code: %s", str(reason)
        )
    else:
        _log.info("the layers run on torch's operators: %s", str(reason))
