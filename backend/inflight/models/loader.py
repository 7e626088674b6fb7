"""Checkpoint tensors → DecoderWeights: checked against the DecoderConfig first, then read and fused.

`find_sources.py` determines which tensors are read, `weight_reader.py` reads them. The files may be replaced after
a load. A long load shows its progress (`inflight.progress`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from inflight.checkpoint_config import checkpoint_name
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import DecoderWeights, DraftHeadWeights, LayerT, LinearT
from inflight.models.find_sources import find_sources
from inflight.models.fitting import fitted, log_left_out, log_untied, untied
from inflight.models.levels import MatrixKind
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels, Sink, is_small_head
from inflight.models.survey import Survey, survey
from inflight.models.weight_reader import WeightReader
from inflight.models.weight_sources import TensorSource, stored_shapes, tensors
from inflight.progress import load_progress


def tensor_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's checkpoint tensors, in the order in which they are read.

    Each expert counts as a separate tensor, even if the checkpoint has all experts in one tensor.
    """
    return stored_shapes(find_sources(model))


def check_weights(model: ModelDescription) -> None:
    """Raise ConfigError unless the checkpoint has the model's tensors. Reads the files' headers only.

    The message names a missing, unexpected or wrongly shaped tensor, and its file.
    """
    survey(model)


def stored_dtype(model: ModelDescription) -> torch.dtype:
    """Return the dtype of the checkpoint's weights; raise ConfigError if there are none.

    It is the dtype in config.json; without one, the dtype of the first tensor that is read.
    """
    if model.decoder.dtype is not None:
        return getattr(torch, model.decoder.dtype)
    return getattr(torch, survey(model).dtype)


def quantized_kinds(model: ModelDescription) -> Counter[MatrixKind]:
    """Count the checkpoint's quantized matrices of each format; reads the files' headers only."""
    if model.quantization is None:
        return Counter()
    return Counter(kind for kind, _ in survey(model).levels.values())


def num_weight_bytes(
    model: ModelDescription,
    dtype: torch.dtype,
    linear_dtype: torch.dtype,
    kept: Set[MatrixKind] = frozenset(),
    part: Part | None = None,
    head_dtype: torch.dtype | None = None,
) -> int:
    """Return the size of a part of the model's weights in bytes; raise ConfigError if the checkpoint lacks a
    tensor.

    Args:
        model: The model whose checkpoint is checked.
        dtype: Dtype of embeddings and vectors.
        linear_dtype: Dtype of linear layers' matrices.
        kept: Formats of quantized matrices in the layers that stay quantized as in the checkpoint.
        part: One rank's part; None: the whole model.
        head_dtype: Dtype of the output projection; if the checkpoint has it quantized and `is_small_head` of it
            is true, it stays quantized. None: it has `linear_dtype`, and does not stay quantized. If its dtype
            differs from `dtype`, a tied embedding is stored twice.
    """
    part = part or Part.whole(model.decoder)
    found = survey(model)
    model = found.model
    of_levels = {name: size for name, (kind, size) in found.levels.items() if kind in kept}
    sources = find_sources(model, part)
    head = sources.lm_head or sources.embedding if part.is_last_stage else None
    keeps_head = head_dtype is not None and head is not None and _is_small_head(head, found)
    head_dtype = head_dtype or linear_dtype
    of_layers = sources.token_inputs
    looked_up = (sources.embedding, sources.position_embedding, of_layers and of_layers.embedding)
    total = 0
    for tensor in tensors(sources):
        if tensor == head and keeps_head:
            total += _level_bytes(tensor, of_levels)
        elif tensor in looked_up:
            total += tensor.num_bytes(dtype)
        elif tensor == sources.lm_head:
            total += tensor.num_bytes(head_dtype)
        elif all(stored_rows.name in of_levels for stored_rows in tensor.parts):
            total += _level_bytes(tensor, of_levels)
        else:
            total += tensor.num_bytes(dtype if tensor.columns is None else linear_dtype)
    is_tied = model.decoder.tied_embeddings and part.is_last_stage
    if sources.embedding is not None and is_tied and head_dtype != dtype and not keeps_head:
        total += sources.embedding.num_bytes(head_dtype)
    return total


def _level_bytes(tensor: TensorSource, of_levels: Mapping[str, int]) -> int:
    return sum(int(of_levels[each.name] * tensor.share_read(each)) for each in tensor.parts)


def _is_small_head(head: TensorSource, found: Survey) -> bool:
    return all(
        each.name in found.levels and is_small_head(*found.levels[each.name], each.rows * (head.columns or 0))
        for each in head.parts
    )


def num_parameters(model: ModelDescription) -> tuple[int, int]:
    """Return the number of the model's parameters, and the number of parameters that one token uses.

    The second number excludes the experts that are not chosen for a token.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(model).items()}
    total, experts = sum(sizes.values()), model.decoder.experts
    if experts is None or model.names.experts is None:
        return total, total
    below_layer = model.names.base + model.names.layers + model.names.experts.prefix.split("{}")[0]
    prefixes = tuple(below_layer.format(index) for index in range(model.decoder.num_layers))
    of_experts = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    return total, total - of_experts // experts.count * (experts.count - experts.num_per_token)


def load_weights_into(
    sink: Sink[LayerT, LinearT],
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    part: Part,
    kept: KeptLevels | None = None,
) -> DecoderWeights[LayerT, LinearT]:
    """Read a part of the model's weights onto `device` as `dtype`, and convert each projection and layer.

    A draft head is not read. Only the results of `sink` are kept, so at most one projection is in memory twice.
    With `kept`, quantized matrices are passed to the sink as levels if it accepts them. The whole checkpoint is
    checked, so that all ranks report equal errors.

    Raises:
        ConfigError: Files are missing or damaged, or tensors are missing, unexpected, wrongly shaped or quantized.
    """
    with Checkpoint(model.folder) as checkpoint:
        fitting = fitted(model, checkpoint)
        model = untied(fitting, checkpoint)
        if model is not fitting:
            log_untied(model)
        log_left_out(model, checkpoint)
        sources = replace(find_sources(model, part), draft_head=None)
        num_bytes = sum(tensor.num_bytes(dtype) for tensor in tensors(sources))
        with load_progress(f"Loading {checkpoint_name(model.folder)}", num_bytes) as advance:
            return WeightReader(checkpoint, dtype, device, sink, kept, advance).read(sources)


def draft_head_bytes(model: ModelDescription, dtype: torch.dtype, part: Part) -> int:
    """Return the memory that a part of the checkpoint's draft head takes if nothing is quantized, in bytes."""
    return sum(
        tensor.num_bytes(dtype) for tensor in tensors(find_sources(survey(model).model, part).draft_head)
    )


def load_mtp_weights(
    sink: Sink[LayerT, LinearT],
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    part: Part,
    kept: KeptLevels | None = None,
) -> DraftHeadWeights[LayerT, LinearT]:
    """Read a part of the checkpoint's draft head as `load_weights_into` reads the model.

    Args:
        sink: Converts each projection and the layer.
        model: A model with `DecoderConfig.has_draft_head`.
        dtype: Dtype of tensors that are not converted.
        device: Device of the weights.
        part: The rank's part of the model, of its last pipeline stage.
        kept: If set, quantized matrices are passed to the sink as levels if it accepts them.

    Raises:
        ConfigError: As `load_weights_into`.
    """
    with Checkpoint(model.folder) as checkpoint:
        sources = find_sources(fitted(model, checkpoint), part).draft_head
        assert sources is not None, "the last stage of a model with a draft head has it"
        return WeightReader(checkpoint, dtype, device, sink, kept, lambda _: None).draft_head(sources)
