"""Checkpoint tensors → DecoderWeights: checked against the DecoderConfig first, then read and fused.

What is read, `weight_sources.py` says; how, `weight_reader.py`. The files may be replaced after a load. A long
load says how far it is (`inflight.progress`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import torch

from inflight.hub import checkpoint_name
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import DecoderWeights, LayerT, LinearT, PlainWeights
from inflight.models.fitting import fitted, untied
from inflight.models.levels import MatrixKind
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels, PlainSink, Sink
from inflight.models.weight_reader import WeightReader
from inflight.models.weight_sources import find_sources, stored_shapes, tensors
from inflight.progress import load_progress


def tensor_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model has, in the order in which they are read, and their shapes.

    Experts that checkpoints have in one tensor count as one each.
    """
    return stored_shapes(find_sources(model))


def check_weights(model: ModelDescription) -> None:
    """Raise ConfigError unless the checkpoint has the model's tensors, by its files' headers: no weight is read.

    The message names a tensor that is missing, one too many or of another shape, and its file.
    """
    with Checkpoint(model.folder) as checkpoint:
        fitted(model, checkpoint)


def stored_dtype(model: ModelDescription) -> torch.dtype:
    """Return the dtype of the checkpoint's weights. ConfigError if there are none."""
    with Checkpoint(model.folder) as checkpoint:
        return _stored_dtype(fitted(model, checkpoint), checkpoint)


def quantized_kinds(model: ModelDescription) -> Counter[MatrixKind]:
    """Count the checkpoint's quantized matrices of each format, by its files' headers."""
    if model.quantization is None:
        return Counter()
    with Checkpoint(model.folder) as checkpoint:
        fitted(model, checkpoint)
        return Counter(levels.kind for levels in checkpoint.levels.values())


def num_weight_bytes(
    model: ModelDescription,
    dtype: torch.dtype,
    linear_dtype: torch.dtype,
    kept: Set[MatrixKind] = frozenset(),
) -> int:
    """Bytes of all the model's weights. ConfigError if the checkpoint does not hold them.

    Args:
        model: What the checkpoint is expected to hold.
        dtype: Of embeddings and vectors.
        linear_dtype: Of the matrices that are multiplied with. An embedding that is the output projection's matrix
            too is there twice if the types differ.
        kept: Which of the quantized matrices stay as the checkpoint has them.
    """
    with Checkpoint(model.folder) as checkpoint:
        model = untied(fitted(model, checkpoint), checkpoint)
        levels, stored = checkpoint.levels, checkpoint.tensors
        of_levels = {name: stored[name].level_bytes or 0 for name in levels if levels[name].kind in kept}
    sources = find_sources(model)
    looked_up = (sources.embedding, sources.position_embedding)
    total = 0
    for tensor in tensors(sources):
        if all(part.name in of_levels for part in tensor.parts):
            total += sum(of_levels[part.name] for part in tensor.parts)
        else:
            is_multiplied = tensor.columns is not None and tensor not in looked_up
            total += tensor.num_bytes(linear_dtype if is_multiplied else dtype)
    if sources.embedding is not None and model.decoder.tied_embeddings and linear_dtype != dtype:
        total += sources.embedding.num_bytes(linear_dtype)
    return total


def num_parameters(model: ModelDescription) -> tuple[int, int]:
    """Return how many numbers the model's tensors have, and how many of them are there for any one token.

    A mixture sends a token to a few of a layer's experts: those of the others are left out of the second.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(model).items()}
    total, experts = sum(sizes.values()), model.decoder.experts
    if experts is None or model.names.experts is None:
        return total, total
    below_layer = model.names.base + model.names.layers + model.names.experts.prefix.split("{}")[0]
    prefixes = tuple(below_layer.format(index) for index in range(model.decoder.num_layers))
    of_experts = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    return total, total - of_experts // experts.count * (experts.count - experts.num_per_token)


def load_weights(
    model: ModelDescription,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part | None = None,
) -> PlainWeights:
    """Read the model's weights onto `device` as `dtype`; None: the checkpoint's.

    Of a part only what it holds is read, but the whole checkpoint is checked: all ranks say what does not fit.

    Raises:
        ConfigError: Files are missing or damaged, or tensors are missing, unexpected, wrongly shaped or quantized.
    """
    return load_weights_into(PlainSink(), model, dtype, device, part or Part.whole(model.decoder))


def load_weights_into(
    sink: Sink[LayerT, LinearT],
    model: ModelDescription,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part,
    kept: KeptLevels | None = None,
) -> DecoderWeights[LayerT, LinearT]:
    """As `load_weights`, but each projection and each layer is given to `sink` once it is read.

    What that returns is kept instead, so that no more than one projection is there twice. With `kept` it is given
    what the checkpoint has quantized as levels, if it keeps them.
    """
    with Checkpoint(model.folder) as checkpoint:
        model = untied(fitted(model, checkpoint), checkpoint)
        target = dtype or _stored_dtype(model, checkpoint)
        sources = find_sources(model, part)
        num_bytes = sum(tensor.num_bytes(target) for tensor in tensors(sources))
        with load_progress(f"Loading {checkpoint_name(model.folder)}", num_bytes) as advance:
            return WeightReader(checkpoint, target, device, sink, kept, advance).read(sources)


def _stored_dtype(model: ModelDescription, checkpoint: Checkpoint) -> torch.dtype:
    """config.json's, else that of the tensor that is read first."""
    first = next(iter(tensor_shapes(model)))
    return getattr(torch, model.decoder.dtype or checkpoint.tensors[first].dtype)
