"""Checks that a checkpoint has the tensors of a model, and finds their names in the checkpoint.

Only the files' headers are read; weights are read only to compare an embedding with the output projection.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from inflight.checkpoint_config import DTYPES
from inflight.errors import ConfigError
from inflight.gguf.folder import is_gguf
from inflight.models.checkpoint import Checkpoint
from inflight.models.families import WeightNames, bases_in_multimodal, heads_in_multimodal
from inflight.models.find_sources import draft_head_prefix, draft_layer_of, find_sources
from inflight.models.gguf_tensors import add_gguf_tensors, log_unpacked
from inflight.models.quantized_tensors import unpack_quantized
from inflight.models.registry import ModelDescription
from inflight.models.stacked_experts import unstack_experts
from inflight.models.weight_sources import stored_shapes

_UNTIED = "%s: tie_word_embeddings is true, but %s and %s differ: the second is used as output projection"
_logger = logging.getLogger(__name__)


def fitted(model: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """Return the model with the names of this checkpoint's tensors; raise ConfigError if the tensors do not fit.

    In a checkpoint of a model without its output projection, names have no prefix. Tensors of a multimodal model's
    text part have one of several prefixes, and tensors of its other parts are left out. Names that only some
    checkpoints of a family have are replaced by the family's, and parts of convolutions are put together. If
    embeddings are tied in config.json and only one of the two tensors is stored, it is used for both. Stacked
    experts are split into one tensor per expert.
    """
    if is_gguf(checkpoint.folder):
        add_gguf_tensors(checkpoint, model)
    has_draft_head = model.decoder.has_draft_head
    kept = draft_head_prefix(model) if has_draft_head else None
    checkpoint.leave_out(tuple(prefix for prefix in model.names.left_out if prefix != kept))
    _rename_others(checkpoint, model.names)
    if model.multimodal is not None:
        model = replace(model, names=_with_stored_prefixes(model.names, checkpoint))
    elif not any(name.startswith(model.names.base) for name in checkpoint.tensors):
        model = replace(model, names=replace(model.names, base=""))
    if model.quantization is not None and not is_gguf(checkpoint.folder):
        if model.names.transposed:
            raise ConfigError(
                f"{checkpoint.folder}: {model.quantization.method} weights are not supported for families that "
                "store matrices as [inputs, outputs]: take the unquantized checkpoint"
            )
        if not model.quantization.is_of_stacks:
            unpack_quantized(checkpoint, model.quantization)
    if has_draft_head:
        unstack_experts(checkpoint, draft_layer_of(model))
    unstack_experts(checkpoint, model)
    _join_convolutions(checkpoint, model)
    embedding, head = _vocabulary_names(model)
    if model.decoder.tied_embeddings and embedding not in checkpoint.tensors and head in checkpoint.tensors:
        checkpoint.rename(head, embedding)
    _check(checkpoint, model)
    return model


def log_left_out(model: ModelDescription, checkpoint: Checkpoint) -> None:
    """Log which tensors of a fitted checkpoint are not read, and which are unpacked, if any."""
    if is_gguf(checkpoint.folder):
        log_unpacked(checkpoint)
    if not checkpoint.left_out:
        return
    counts = ", ".join(f"{prefix.rstrip('.')} ({count})" for prefix, count in checkpoint.left_out.items())
    of = model.multimodal
    _logger.info(
        "%s: %stensors not read: %s",
        model.folder,
        "" if of is None else f"the engine has the text part of {of.architecture}; ",
        counts,
    )


def untied(model: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """Return a fitted model, with its embeddings tied or not as in transformers.

    If both tensors are stored, they are tied if they are equal, and otherwise used as stored.
    """
    embedding, head = _vocabulary_names(model)
    if not model.decoder.tied_embeddings or head not in checkpoint.tensors:
        return model
    if _is_same(checkpoint, embedding, head):
        return model
    return replace(model, decoder=replace(model.decoder, tied_embeddings=False))


def log_untied(model: ModelDescription) -> None:
    """Log a warning that `untied` uses the embeddings as stored, contrary to config.json."""
    base = model.names.base
    _logger.warning(_UNTIED, model.folder, base + model.names.embedding, model.names.lm_head)


def _rename_others(checkpoint: Checkpoint, names: WeightNames) -> None:
    """Give tensors whose names match `names.other_names` the family's names, unless a tensor has that
    name."""
    for name in list(checkpoint.tensors):
        new_name = names.of_family(name)
        if new_name not in checkpoint.tensors:
            checkpoint.rename(name, new_name)


def _join_convolutions(checkpoint: Checkpoint, model: ModelDescription) -> None:
    """Put the parts of each recurrent layer's convolution together, if the checkpoint has them."""
    names, recurrent = model.names, model.names.recurrent
    if recurrent is None or not recurrent.conv_parts:
        return
    for layer in range(model.decoder.num_layers):
        prefix = names.base + names.layers.format(layer)
        parts = [f"{prefix}{part}.weight" for part in recurrent.conv_parts]
        if all(part in checkpoint.tensors for part in parts):
            checkpoint.join(parts, f"{prefix}{recurrent.conv[0]}.weight")


def _with_stored_prefixes(names: WeightNames, checkpoint: Checkpoint) -> WeightNames:
    """Return the names of a text part with the prefixes that this checkpoint has."""

    def has(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in checkpoint.tensors)

    base = next(
        filter(lambda base: has(base + names.layers.format(0)), bases_in_multimodal(names)), names.base
    )
    head = next(filter(lambda head: has(f"{head}."), heads_in_multimodal(names)), names.lm_head)
    return replace(names, base=base, lm_head=head)


def _vocabulary_names(model: ModelDescription) -> tuple[str, str]:
    """Return the names of the embedding's and the output projection's tensors."""
    return f"{model.names.base}{model.names.embedding}.weight", f"{model.names.lm_head}.weight"


def _is_same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Return whether two tensors have the same dtype and equal values."""
    if checkpoint.tensors[one].dtype != checkpoint.tensors[other].dtype:
        return False
    both = checkpoint.read(one), checkpoint.read(other)
    try:
        return torch.equal(*both)
    finally:
        for tensor in both:
            checkpoint.release_pages(tensor)


def _check(checkpoint: Checkpoint, model: ModelDescription) -> None:
    decoder = model.decoder
    expected = stored_shapes(find_sources(model))
    missing = [name for name in expected if name not in checkpoint.tensors]
    of_head = tuple(map(draft_head_prefix, [model] if decoder.has_draft_head else ()))
    if lacking := [name for name in missing if name.startswith(of_head)]:
        raise ConfigError(
            f"{checkpoint.folder}: speculative_decoding_mode is mtp, expected a checkpoint with a draft head: "
            f"missing {_some(lacking)}"
        )
    head = _vocabulary_names(model)[1]
    if decoder.tied_embeddings and head in checkpoint.tensors:
        expected[head] = (decoder.vocab_size, decoder.hidden_size)
    ignored, unused = model.names.ignored or ("\0",), _unused_keys_and_values(model)
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in expected
        and not name.endswith(ignored)
        and not _is_of_draft_layer(name, model)
        and not name.startswith(of_head)
        and not name.startswith(unused)
    ]
    if missing or unexpected:
        raise ConfigError(
            f"{checkpoint.folder}: the weights do not fit config.json: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )
    for name, shape in expected.items():
        info = checkpoint.tensors[name]
        if info.shape != shape:
            said = f"shape {list(info.shape)}, expected {list(shape)} from config.json"
        elif info.dtype not in DTYPES:
            said = f"dtype {info.dtype}, expected one of {', '.join(DTYPES)}"
        else:
            continue
        raise ConfigError(f"{checkpoint.folder / info.file}: tensor {name!r} has {said}")


def _is_of_draft_layer(name: str, model: ModelDescription) -> bool:
    """Return whether a tensor belongs to a draft layer, which is a layer after the model's last one."""
    first = model.decoder.num_layers
    layers = range(first, first + model.decoder.num_draft_layers)
    return name.startswith(tuple(model.names.base + model.names.layers.format(index) for index in layers))


def _unused_keys_and_values(model: ModelDescription) -> tuple[str, ...]:
    """Return prefixes of unused tensors: key and value projections of layers that read another layer's keys and
    values."""
    names, attention = model.names, model.names.attention
    modules = (*attention.qkv[1:], attention.key_norm)
    layers = (each for each in range(model.decoder.num_layers) if not model.decoder.has_own_kv(each))
    return tuple(
        f"{names.base}{names.layers.format(layer)}{module}." for layer in layers for module in modules
    )


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
