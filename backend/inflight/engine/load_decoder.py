"""Chooses the decoder that computes a model, and reads the weights into it.

It is compiled code where the machine can run that, else torch's operators. Where int8 or fp8 is asked for and no
compiled code computes it, weights are quantized as they are read (`layers/quantized_linear.py`). Loading thread.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from inflight.config import FP8, INT8, QUANTIZED, EngineConfig
from inflight.engine.attention.find import find_attention
from inflight.engine.collectives import Collectives
from inflight.engine.cpu import packing
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.library import CannotBuild, load_library
from inflight.engine.cpu.packing import PackedLayer, PackedLinear, Packer
from inflight.engine.cuda.row_kernels import find_row_kernels
from inflight.engine.host_memory import zeros
from inflight.engine.kv_rounding import find_rounding
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.grouped_linear import KeepingLevels
from inflight.engine.layers.layer_check import find_operations
from inflight.engine.layers.quantized_linear import Quantizing
from inflight.engine.layers.transformers_decoder import TransformersDecoder, TransformersModel
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, Layer, Linear, load_weights
from inflight.models.finisher import Finisher
from inflight.models.levels import GroupedMatrix, Kind
from inflight.models.loader import load_finished_weights, quantized_kinds, stored_dtype
from inflight.models.registry import ModelDescription, UnknownFamily, read_model_description
from inflight.models.sharding import WHOLE, Part, Shard

_log = logging.getLogger(__name__)
_MAX_GROUP, _MAX_HEAD_DIM = 12, 256  # kTile and kMaxHeadDim of cpu/source/attention.h
_INSTALL = "pip install -e '.[transformers]' in the checkout"

AnyDecoder = Decoder | NativeDecoder | TransformersDecoder


class _Packing(Finisher[PackedLayer, PackedLinear]):
    """Packs every matrix as it is read, and gives the memory back that it was read into.

    With `keeps_levels` projections stay as the checkpoint has quantized them, and the output projection, which it
    seldom has, is int8.
    """

    def __init__(self, packer: Packer, keeps_levels: bool) -> None:
        self._packer = packer
        self.keeps_levels = keeps_levels
        # int8 columns are no rows that could be looked up.
        self.keeps_tied_embedding = packer.int8 or keeps_levels
        self._kept: Counter[Kind] = Counter()
        self._unpacked: dict[str, list[str]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().empty(shape, dtype, device) if len(shape) == 1 else zeros(shape, dtype)

    def linear(self, linear: Linear, is_gated: bool = False) -> PackedLinear:
        return self._packer.linear(linear, is_gated)

    def stack(
        self, matrices: Iterator[Tensor], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> PackedLinear:
        return self._packer.stack(matrices, shape, bias, is_gated)

    def head(self, linear: Linear) -> PackedLinear:
        return self._packer.linear(linear, int8=self._packer.int8 or self.keeps_levels)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        return packing.why_unpacked(matrix, is_stack)

    def keep_levels(self, matrix: GroupedMatrix, bias: Tensor | None, is_gated: bool) -> PackedLinear:
        self._kept[matrix.kind] += 1
        return self._packer.levels(matrix, bias, is_gated)

    def keep_stacked_levels(
        self, matrices: Iterator[GroupedMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> PackedLinear:
        first = next(matrices)
        packed = self._packer.stacked_levels(chain((first,), matrices), shape, bias, is_gated)
        self._kept[first.kind] += 1
        return packed

    def note_unpacked(self, name: str, reason: str) -> None:
        self._unpacked.setdefault(reason, []).append(name)

    def layer(self, layer: Layer[PackedLinear]) -> PackedLayer:
        return self._packer.layer(layer)

    def say(self, dtype: torch.dtype) -> None:
        """Log what has become of the quantized projections."""
        if not self.keeps_levels:
            return
        kept = " and ".join(f"{count} in {kind.value}" for kind, count in self._kept.items())
        _log.info(
            "quantized projections stay as the checkpoint has them (%s), and what they multiply is rounded to "
            "int8; the output projection is int8 by row; dtype bfloat16 unpacks and rounds nothing",
            kept or "none",
        )
        for reason, names in self._unpacked.items():
            short = str(dtype).removeprefix("torch.")
            _log.warning(
                "%d quantized projections are unpacked to %s (%s): %s", len(names), short, names[0], reason
            )


def find_model(
    config: EngineConfig, device: torch.device, num_ranks: int
) -> ModelDescription | TransformersModel:
    """The checkpoint's description, or the model itself if transformers' own code is to run it.

    That is so where the parameter `engine` asks for it, and, without it, for families that have no map here.

    Raises:
        ConfigError: The checkpoint cannot be used, by the one that is asked for or by both.
    """
    path = str(config.gpt_model_path)
    is_installed = importlib.util.find_spec("transformers") is not None
    if config.implementation != "transformers":
        try:
            return read_model_description(path)
        except UnknownFamily as error:
            if config.implementation == "torch":
                raise
            if not is_installed:
                raise ConfigError(f"{error}; transformers' own code may run it: {_INSTALL}") from error
            _log.warning(
                "%s has no map here: transformers' own code runs it, which is slower (%s)", error.family, path
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
    """Read the weights of `part` into the decoder that suits; ConfigError if what is asked for cannot be had."""
    if isinstance(model, TransformersModel):
        return _take_transformers(config, model, device, windows)
    is_int8, dtype = config.dtype == INT8, computed_dtype(config, model)
    kept = kept_by_compiled_layers(config, model, device)
    try:
        computed = torch.bfloat16 if kept else dtype
        library = _find_library(config, model.decoder, computed, device, part.shard, is_int8 or bool(kept))
    except CannotBuild as reason:
        _settle_for_torch(config, device, reason)
        if config.dtype in QUANTIZED:
            _say_unpacked(config, model, dtype, otherwise="")
            weights = load_finished_weights(
                model, dtype, device, part, Quantizing(config.dtype, dtype, device)
            )
        elif keeps_levels(config, model, device):
            keeping = KeepingLevels(dtype, device)
            weights = load_finished_weights(model, dtype, device, part, keeping)
            keeping.say()
        else:
            _say_unpacked(config, model, dtype, "torch's operators would unpack them for every product")
            weights = load_weights(model, dtype, device, part)
        held = part.held_config(model.decoder)
        attention = find_attention(config, held, windows, dtype, device)
        operations = find_operations(held, dtype, device, find_rounding(config.kv_cache_dtype))
        row_kernels = find_row_kernels(model.decoder.vocab_size, device)
        parts = part, collectives, attention, operations, row_kernels
        return Decoder(model.decoder, weights, windows, max_sequence_length, *parts)
    if not kept:
        _say_unpacked(config, model, computed, "compiled layers do not multiply them as they are")
    packer = Packer(library, computed, is_int8, torch.get_num_threads())
    finisher = _Packing(packer, bool(kept))
    weights = load_finished_weights(model, computed, device, part, finisher)
    finisher.say(computed)
    return NativeDecoder(
        model.decoder,
        weights,
        packer,
        windows,
        max_sequence_length,
        config.tokens_per_block,
        part,
        collectives,
        find_rounding(config.kv_cache_dtype),
    )


def _take_transformers(
    config: EngineConfig,
    model: TransformersModel,
    device: torch.device,
    windows: tuple[AttentionWindow | None, ...],
) -> TransformersDecoder:
    from inflight.engine.layers.transformers_model import check_decoder

    attention = find_attention(config, model.decoder, windows, model.dtype, device)
    check_decoder(model, attention, config)
    return TransformersDecoder(model, windows, attention)


def computed_dtype(config: EngineConfig, model: ModelDescription) -> torch.dtype:
    """The dtype of activations and KV cache, and of weights unless they are quantized."""
    if config.dtype is None:
        return stored_dtype(model)
    return torch.bfloat16 if config.dtype in QUANTIZED else getattr(torch, config.dtype)


def kept_by_compiled_layers(
    config: EngineConfig, model: ModelDescription, device: torch.device
) -> frozenset[Kind]:
    """The kinds of the checkpoint's quantized matrices that compiled layers multiply as they are, in bfloat16.

    Empty where a dtype is asked for, and where the checkpoint's own is float32: matrices are unpacked to that.
    """
    if device.type != "cpu" or not _has_own_dtype(config, model):
        return frozenset()
    return packing.KEPT & quantized_kinds(model).keys()


def keeps_levels(config: EngineConfig, model: ModelDescription, device: torch.device) -> bool:
    """Whether torch's operators keep what the checkpoint has quantized: on a GPU, or where `kernels` is torch.

    On a CPU it takes longer to unpack a matrix than to multiply with it, and memory is all that is won. Of 4-bit
    floats that decides: a model's experts have them, which in 16 bits take four times as much.
    """
    if not _has_own_dtype(config, model):
        return False
    is_asked_for = config.kernels == "torch" or device.type == "cuda"
    return is_asked_for or Kind.FLOAT4 in quantized_kinds(model)


def kept_kinds(config: EngineConfig, model: ModelDescription, device: torch.device) -> frozenset[Kind]:
    """The kinds of quantized matrices that stay as the checkpoint has them, if compiled code can run here."""
    if keeps_levels(config, model, device):
        return frozenset(quantized_kinds(model))
    return kept_by_compiled_layers(config, model, device)


def _has_own_dtype(config: EngineConfig, model: ModelDescription) -> bool:
    """Whether a quantized checkpoint is to be as it is: a dtype that is asked for is what it is unpacked to.

    So is float32 where that is the checkpoint's own.
    """
    is_quantized = config.dtype is None and model.quantization is not None
    return is_quantized and stored_dtype(model) is not torch.float32


def _say_unpacked(config: EngineConfig, model: ModelDescription, dtype: torch.dtype, otherwise: str) -> None:
    """Log that quantized matrices are unpacked, if there are any; `otherwise`: why, if nobody has asked for it."""
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
) -> ctypes.CDLL:
    """The compiled code; CannotBuild where torch's operators are asked for or have to do."""
    check_native(config, decoder, dtype, device, shard)
    is_rounded, name = find_rounding(config.kv_cache_dtype) is not None, str(dtype).removeprefix("torch.")
    library = load_library(name, int8, is_rounded)
    _log.info("the layers run on compiled code for %s", library.description)
    return library


def check_native(
    config: EngineConfig,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> None:
    """CannotBuild where compiled code is not for this model, or not asked for, whatever the machine has.

    `shard`: which part of its layers a rank has.
    """
    if config.kernels == "torch":
        raise CannotBuild("kernels is torch")
    if config.dtype == FP8:
        raise CannotBuild("it has no fp8")
    if device.type != "cpu":
        raise CannotBuild(f"it is for CPUs, and the device is {device.type}")
    _check_components(decoder, shard)
    _check_sizes(decoder, config.tokens_per_block, dtype)


def _check_components(decoder: DecoderConfig, shard: Shard) -> None:
    """CannotBuild for what the compiled layers do not have."""
    experts = decoder.experts
    lacking = {
        "latent attention": decoder.latent is not None,
        "a router with groups, biases of the choice, or sigmoids": experts is not None
        and (experts.num_groups > 1 or experts.has_choice_bias or experts.scoring != "softmax"),
        "scaled results of experts": experts is not None and experts.result_scale != 1.0,
        "attention and MLP beside each other": decoder.parallel_residual,
        "norms over all heads together on several ranks": decoder.qk_norm == "projection" and shard.size > 1,
        "expert parallelism": shard.moe_ep_size > 1,
    }
    if missing := [what for what, is_needed in lacking.items() if is_needed]:
        raise CannotBuild(f"it does not have what this model needs: {', '.join(missing)}")


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
