"""Survey of a checkpoint: what its headers say about a model's weights, read once for all steps of a load.

A mixture of experts may have a hundred thousand tensors: to read and check their headers then takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from inflight.models.checkpoint import Checkpoint
from inflight.models.find_sources import find_sources
from inflight.models.fitting import fitted, untied
from inflight.models.levels import MatrixKind
from inflight.models.registry import ModelDescription
from inflight.models.weight_sources import tensors

_OF_CHECKPOINTS = (".safetensors", ".gguf", ".json")


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint that fits a model.

    Attributes:
        model: The model, with the names of the checkpoint's tensors, and its embeddings tied or not.
        dtype: Dtype of the weights: the one in config.json; without one, that of the first tensor that is read.
        levels: Format of each quantized matrix, and the size of its levels and scales in bytes.
    """

    model: ModelDescription
    dtype: str
    levels: dict[str, tuple[MatrixKind, int]]


def survey(model: ModelDescription) -> Survey:
    """Return the survey of a model's checkpoint; raise ConfigError if the tensors do not fit the model.

    The last survey is kept until another checkpoint is surveyed or a file of this one changes.
    """
    return _survey(model, file_states(model.folder))


@lru_cache(maxsize=1)
def _survey(model: ModelDescription, _: tuple[tuple[str, int, int, int], ...]) -> Survey:
    with Checkpoint(model.folder) as checkpoint:
        found = untied(fitted(model, checkpoint), checkpoint)
        stored = checkpoint.tensors
        dtype = found.decoder.dtype or stored[next(tensors(find_sources(found))).parts[0].name].dtype
        levels = {
            name: (each.kind, stored[name].level_bytes or 0) for name, each in checkpoint.levels.items()
        }
        return Survey(found, dtype, levels)


def file_states(checkpoint: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size and times of a checkpoint's files, which change whenever a file is replaced."""
    files = sorted(file for file in checkpoint.iterdir() if file.suffix in _OF_CHECKPOINTS and file.is_file())
    found = [(file.name, file.stat()) for file in files]
    return tuple((name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in found)
