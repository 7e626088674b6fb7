"""Loads a decoder with transformers' own modelling code, for families that this package does not implement, or on
request.

The structure of such a model is found out by trial. A forward pass of a few tokens, in which attention only
records its arguments, shows which layers attend, with which heads, scale, cap and window; `check_decoder`
compares the logits over paged blocks with the logits by the model's own attention. A model whose attention is
not supported is refused with the reason. Code that comes with a checkpoint is never run. Imports transformers,
so this module is imported on demand; used on the loading thread only.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.checkpoint_config import DTYPES, ConfigFile, read_config_file
from inflight.config import QUANTIZED, EngineConfig
from inflight.engine.attention.interface import Attention
from inflight.engine.layers.transformers_decoder import (
    EXAMPLE_LENGTHS,
    AttentionHandler,
    TransformersDecoder,
    TransformersModel,
    attend,
    handling_attention,
    make_mask,
    relative_error,
)
from inflight.engine.memory import (
    LESS_WEIGHTS_OF_TRANSFORMERS,
    free_memory,
    is_out_of_memory,
    left_by_weights,
)
from inflight.engine.windows import layer_windows
from inflight.errors import ConfigError
from inflight.gguf.folder import is_gguf
from inflight.json_values import is_object
from inflight.models import DecoderConfig
from inflight.models.checkpoint import Checkpoint
from inflight.models.unserved import UNSERVED
from inflight.multimodal import other_inputs
from inflight.pooling import has_pooling

_log = logging.getLogger(__name__)

_ATTENTION = "inflight_paged"
_BOUNDS = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Upper bounds of `relative_error`: rounding causes far smaller errors, a wrong position or mask far
larger ones."""

transformers.AttentionInterface.register(_ATTENTION, attend)  # pyright: ignore[reportUnknownMemberType]  no return type
ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, make_mask)  # pyright: ignore[reportUnknownMemberType]  no return type


def load_transformers_model(config: EngineConfig, device: torch.device, num_ranks: int) -> TransformersModel:
    """Read all weights, and find out by trial which attention the model needs.

    Args:
        config: The model and its parameters; `gpt_model_path` is a checkpoint folder with safetensors files.
        device: The model's device.
        num_ranks: Number of ranks that share the model.

    Raises:
        ConfigError: A parameter asks for something that this engine does not have, or this engine cannot serve the
            checkpoint; the message has the model's type and the reason.
        Exception: There is too little memory, see `is_out_of_memory`.
    """
    _check_parameters(config, num_ranks)
    file = read_config_file(str(config.gpt_model_path))
    model_class = find_class(file)
    if file.has("quantization_config"):
        raise file.error(
            "quantization_config", "no such key: --engine transformers reads no quantized weights"
        )
    refuse = _Refusal.of(file)
    if is_gguf(file.path.parent):
        raise refuse("its weights are in a GGUF file, which --engine torch reads")
    check_room(config, file, device)
    model = _read(model_class, config.dtype, device, refuse)
    try:
        with torch.inference_mode():
            return _examine(model, device, refuse)
    except ConfigError:
        raise
    except Exception as error:  # modelling code made for other uses may raise anything
        if is_out_of_memory(error):
            raise
        raise refuse(f"it fails when it is tried: {_first_line(error)}") from error


def find_class(file: ConfigFile) -> Any:
    """Return transformers' class for a config.json, without loading weights; raises ConfigError if it cannot be
    served."""
    refuse = _Refusal.of(file)
    model_class = getattr(transformers, _class_name(file, refuse))
    if getattr(model_class, "_is_stateful", False):
        raise refuse("it keeps a recurrent state, which KV blocks do not hold")
    if not model_class._can_set_attn_implementation():
        raise refuse("its attention does not go through transformers' attention interface")
    return model_class


def check_room(config: EngineConfig, file: ConfigFile, device: torch.device) -> None:
    """Raise ConfigError if the weights do not fit into the free memory; only headers of files are read.

    Args:
        config: The parameter dtype is used.
        file: config.json of the checkpoint.
        device: The model's device.
    """
    dtype = config.dtype or file.text_or_none("dtype") or file.text_or_none("torch_dtype")
    try:
        with Checkpoint(file.path.parent) as checkpoint:
            stored = list(checkpoint.tensors.values())
    except ConfigError as error:
        raise _Refusal.of(file)(f"transformers cannot load it: {error}") from error
    num_bytes = sum(
        math.prod(each.shape) * _item_size(dtype if dtype in DTYPES else each.dtype) for each in stored
    )
    on_gpu = device.type == "cuda"
    left_by_weights(num_bytes, free_memory(device), on_gpu, LESS_WEIGHTS_OF_TRANSFORMERS)


def _item_size(dtype: str) -> int:
    """Return the bytes of a number; 4 for other dtypes, which are refused when they have been read."""
    return getattr(torch, dtype).itemsize if dtype in DTYPES else 4


def check_decoder(model: TransformersModel, attention: Attention, config: EngineConfig) -> None:
    """Raise ConfigError if the model's logits over paged blocks differ from its logits by its own attention."""
    refuse = _Refusal(Path(str(config.gpt_model_path)), model.body.config.model_type)
    own_windows = layer_windows(model.decoder.sliding_windows, (), 0, model.decoder.max_positions)
    try:
        decoder = TransformersDecoder(model, own_windows, attention)
        error = relative_error(decoder, model, config.tokens_per_block)
    except Exception as reason:  # modelling code made for other uses may raise anything
        raise refuse(f"it fails over paged blocks: {_first_line(reason)}") from reason
    if not error < _BOUNDS[model.dtype]:  # true for NaN too
        raise refuse(
            f"its logits over paged blocks are off by {error:.3g} of their standard deviation, expected less than "
            f"{_BOUNDS[model.dtype]:g}: it keeps more than keys and values, or its attention depends on more than "
            "positions"
        )
    _log.info(
        "the layers are transformers' own code (%s), without CUDA graphs; a trial of %d tokens is off by %.2g of "
        "the logits' standard deviation",
        type(model.head).__name__,
        sum(EXAMPLE_LENGTHS),
        error,
    )


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Makes the error for a model that cannot be served."""

    folder: Path
    model_type: str | None
    architectures: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: ConfigFile) -> _Refusal:
        return cls(file.path.parent, file.text_or_none("model_type"), tuple(file.texts("architectures")))

    def __call__(self, reason: str) -> ConfigError:
        classes = f" (architectures {', '.join(self.architectures)})" if self.architectures else ""
        return ConfigError(
            f"{self.folder}: model_type {self.model_type!r}{classes} cannot be served by transformers' own code: "
            f"{reason}"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _check_parameters(config: EngineConfig, num_ranks: int) -> None:
    """Raise ConfigError for options that this engine does not have, naming the parameter."""
    lacking = {
        "dtype": (config.dtype in QUANTIZED, "float32, bfloat16 or float16"),
        "kernels": (config.kernels == "native", "torch, or none"),
        "lora_cache_gpu_memory_fraction": (bool(config.lora_cache_gpu_memory_fraction), "0, or none"),
    }
    for name, (is_wanted, expected) in lacking.items():
        if is_wanted:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, expected {expected}: transformers' own code runs "
                f"{config.gpt_model_path}, which has no int8, fp8, compiled layers or LoRA adapters here"
            )
    if num_ranks > 1:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {num_ranks}, expected 1: transformers' own "
            f"code runs {config.gpt_model_path}, on one rank"
        )


def _class_name(file: ConfigFile, refuse: _Refusal) -> str:
    """Return the name of the checkpoint's model class; raises ConfigError if transformers has no such decoder."""
    model_type = refuse.model_type
    if needed := UNSERVED.get(model_type or ""):
        raise refuse(f"it needs {needed}")
    known = f"transformers {transformers.__version__}"
    if model_type is None or model_type not in CONFIG_MAPPING:
        own = (
            ", and code that comes with a checkpoint (auto_map) is never run" if file.has("auto_map") else ""
        )
        raise refuse(f"{known} has no code for it{own}")
    if file.values.get("is_encoder_decoder") or getattr(
        CONFIG_MAPPING[model_type], "is_encoder_decoder", False
    ):
        raise refuse("it has an encoder beside the decoder")
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        raise refuse(f"{known} has no decoder of text of that type")
    architectures = file.texts("architectures") or names[:1]
    if has_pooling(file.path.parent):  # its class may be that of the decoder without output projection
        architectures = [re.sub("Model$", "ForCausalLM", name) for name in architectures]
    found = [name for name in architectures if name in names]
    if not found:
        raise refuse(
            f"architectures is {list(architectures)}, expected {' or '.join(names)}, which predicts the next token"
        )
    if senses := other_inputs(file.values):
        raise refuse(f"it takes more than text ({', '.join(senses)})")
    return found[0]


def _read(model_class: Any, dtype: str | None, device: torch.device, refuse: _Refusal) -> Any:
    """Load the model with its weights, from files in the folder alone."""
    assert refuse.model_type is not None, "find_class has found a class for model_type"
    transformers.utils.logging.disable_progress_bar()
    try:
        # Use the type's own configuration class: a model class may belong to another type with other defaults.
        config = CONFIG_MAPPING[refuse.model_type].from_pretrained(refuse.folder)  # pyright: ignore[reportUnknownMemberType]  bare PathLike
        if has_pooling(refuse.folder):  # its output projection is not used, and often not stored
            config.tie_word_embeddings = True
        model, found = model_class.from_pretrained(
            refuse.folder,
            config=config,
            attn_implementation=_ATTENTION,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a broken checkpoint raises errors of every class
        if is_out_of_memory(error):
            raise
        raise refuse(f"transformers cannot load it: {_first_line(error)}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found.get(what) or ())):
            raise refuse(f"{what.replace('_', ' ')} in its safetensors files: {', '.join(names[:5])}")
    if model.dtype not in _BOUNDS:
        expected = ", ".join(str(dtype) for dtype in _BOUNDS)
        raise refuse(
            f"its weights are of {model.dtype}, expected {expected}; the parameter dtype converts them"
        )
    return model.eval().to(device)


@dataclass(frozen=True, slots=True)
class _LayerAttention:
    """The arguments of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None
    window: int | None


@dataclass(slots=True)
class _RecordingHandler(AttentionHandler):
    """Records the arguments of every layer's attention calls, and computes nothing.

    Attributes:
        refuse: Makes the error for a model that needs unsupported attention.
        layers: Recorded arguments, by layer.
        masks: The masks that `mask` has returned, each with its window; a mask is recognized by identity.
    """

    refuse: Callable[[str], ConfigError]
    layers: dict[int, _LayerAttention] = field(default_factory=dict[int, _LayerAttention])
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list[tuple[Tensor, "int | None"]])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Record the layer's arguments; return zeros."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise self.refuse(f"a layer of attention, {type(module).__name__}, has no layer_idx")
        if layer in self.layers:
            raise self.refuse(f"layer {layer} attends more than once")
        window = options.get("sliding_window")
        of_mask = [size for each, size in self.masks if each is mask]
        if mask is not None and not of_mask:
            raise self.refuse(f"layer {layer} adds another mask to the scores")
        if of_mask:
            if window not in (None, of_mask[0]):
                raise self.refuse(
                    f"layer {layer} has a window of {window}, but the window of its mask is {of_mask[0]}"
                )
            window = of_mask[0]  # attention by products uses only the mask
        if not (getattr(module, "is_causal", True) and options.get("is_causal") in (None, True)):
            raise self.refuse(f"layer {layer} is not causal")
        tensors = {name for name, given in options.items() if isinstance(given, Tensor)}
        if unknown := sorted(tensors - {"position_ids", "cache_position"}):
            raise self.refuse(f"the attention of layer {layer} depends on {', '.join(unknown)}")
        if not key.shape == value.shape or query.shape[-1] != key.shape[-1]:
            raise self.refuse(
                f"layer {layer} has queries of {query.shape[-1]}, keys of {key.shape[-1]} and values of "
                f"{value.shape[-1]}, expected heads of one size"
            )
        scale, head_dim = options.get("scaling"), query.shape[-1]
        self.layers[layer] = _LayerAttention(
            query.shape[1],
            key.shape[1],
            head_dim,
            head_dim**-0.5 if scale is None else float(scale),
            options.get("softcap"),
            window,
        )
        return torch.zeros_like(query).transpose(1, 2)

    def mask(self, options: Mapping[str, Any]) -> Tensor:
        """Return any tensor and record its window; raises ConfigError unless the mask is causal or a sliding
        window."""
        size, sees = options.get("local_size"), options["mask_function"]
        edges = [0, 1, 2, 500, 5000]
        if size is not None:
            edges += [count * size + more for count in (1, 2, 3) for more in (-1, 0, 1)]
        places = torch.tensor(sorted(set(edges)))
        rows, keys = places[:, None], places[None, :]
        expected = keys <= rows
        if size is not None:
            expected &= keys > rows - size
        zero = torch.tensor(0)
        if not torch.equal(torch.as_tensor(sees(zero, zero, rows, keys)).expand_as(expected), expected):
            raise self.refuse("its mask is neither causal nor a sliding window")
        mask = torch.zeros(1, 1, 1, 1)
        self.masks.append((mask, size))
        return mask

    def finish(self, num_layers: int) -> Sequence[_LayerAttention]:
        """Return the layers in order; all must have the same heads, scale and cap."""
        if self.layers.keys() != set(range(num_layers)):
            raise self.refuse(
                f"{len(self.layers)} of its {num_layers} layers attend through transformers' attention interface, "
                "expected all"
            )
        layers = [self.layers[number] for number in range(num_layers)]
        for what in ("num_heads", "num_kv_heads", "head_dim", "scale", "soft_cap"):
            values = {getattr(layer, what) for layer in layers}
            if len(values) > 1:
                raise self.refuse(
                    f"its layers differ in {what}: {sorted(values, key=str)}, expected one value"
                )
        return layers


class _Identity(nn.Module):
    """Replaces a model's body by a module that returns its input, so that the head can be called alone.

    Args:
        output_class: The class of the body's output.
    """

    def __init__(self, output_class: type[Any]) -> None:
        super().__init__()
        self._output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output_class(last_hidden_state=inputs_embeds)


def _examine(model: Any, device: torch.device, refuse: _Refusal) -> TransformersModel:
    """Try the model, then separate its head from its body."""
    generator = torch.Generator().manual_seed(0)
    inputs = model.get_input_embeddings()
    body = model.base_model
    if body is model or not isinstance(inputs, nn.Embedding):
        raise refuse("it has no embedding of tokens, or no body apart from its head")
    first, second = (
        torch.randint(inputs.num_embeddings, (length,), generator=generator).to(device)
        for length in EXAMPLE_LENGTHS
    )
    recorded = _RecordingHandler(refuse)
    with handling_attention(recorded):
        output = body(input_ids=first[None], use_cache=False, return_dict=True)
    layers = recorded.finish(model.config.num_hidden_layers)
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise refuse("it has no implementation of attention to compare with")
    examples = (first, _logits(model, first)), (second, _logits(model, second))
    model.set_attn_implementation(_ATTENTION)
    setattr(model, model.base_model_prefix, _Identity(output.__class__))
    hidden_size, vocab_size = output.last_hidden_state.shape[-1], examples[0][1].shape[-1]
    decoder = _describe(model, layers, hidden_size, vocab_size, refuse)
    return TransformersModel(decoder, model.dtype, body, model, examples)


def _logits(model: Any, token_ids: Tensor) -> Tensor:
    return model(input_ids=token_ids[None], use_cache=False, return_dict=True).logits[0].float()


def _describe(
    model: Any, layers: Sequence[_LayerAttention], hidden_size: int, vocab_size: int, refuse: _Refusal
) -> DecoderConfig:
    """Return the model's configuration for the KV cache, attention and the scheduler."""
    config, any_layer = model.config, layers[0]
    end_ids = model.generation_config.eos_token_id
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(layers),
        num_heads=any_layer.num_heads,
        num_kv_heads=any_layer.num_kv_heads,
        head_dim=any_layer.head_dim,
        max_positions=_max_positions(config, refuse),
        sliding_windows=tuple(layer.window for layer in layers),
        attention_scale=any_layer.scale,
        attention_soft_cap=any_layer.soft_cap,
        eos_token_ids=() if end_ids is None else (end_ids,) if isinstance(end_ids, int) else tuple(end_ids),
        dtype=str(model.dtype).removeprefix("torch."),
        # Only the modelling code needs the following fields; nothing in this package reads them.
        intermediate_size=0,
        norm="rms",
        norm_eps=0.0,
        activation="silu",
        gated_mlp=False,
        ropes=(None,) * len(layers),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
    )


def _max_positions(config: Any, refuse: _Refusal) -> int:
    """Return the length in tokens up to which rotary frequencies stay the same; with LongRoPE, up to which the
    short factors apply."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise refuse("config.json has no max_position_embeddings, the limit of its positions")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if is_object(part))):
        if each.get("rope_type") == "longrope":
            longest = min(longest, each.get("original_max_position_embeddings") or longest)
    return longest
