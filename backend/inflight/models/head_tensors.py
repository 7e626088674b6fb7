"""Checks of the tensors in the folder of a draft head, by the headers of its weight files alone, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from inflight.errors import ConfigError
from inflight.pickled_header import PICKLED, pickled_file, pickled_tensors
from inflight.safetensors_header import TensorHeader, stored_tensors


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of all safetensors files in `folder`; if there are none, those of pytorch_model.bin.

    Raises:
        ConfigError: The folder has no such file, or a damaged one.
    """
    pickled = pickled_file(folder)
    if pickled is not None:
        stored = pickled_tensors(pickled)
        if not stored:
            raise ConfigError(
                f"{pickled} is not a whole file of tensors that torch.save has written: download it again"
            )
        return stored
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ConfigError(
            f"{folder}: speculative_model_dir has {names}, expected model.safetensors or {PICKLED}"
        )
    found: dict[str, TensorHeader] = {}
    for file in files:
        of_file = stored_tensors(file)
        if not of_file:
            raise ConfigError(f"{file} has no tensors, or is not a whole file of safetensors")
        found |= of_file
    return found


def check_tensors(
    folder: Path,
    stored: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    of_token_ids: str,
    kind: str,
    not_read: Collection[str] = (),
) -> None:
    """Raise ConfigError unless `stored` are the head's tensors in their shapes, and no others.

    Args:
        folder: The head's folder.
        stored: The tensors that it has.
        shapes: The shape of each tensor that it must have.
        of_token_ids: Name of the tensor of token ids, whose numbers are integers.
        kind: End of a message about other names, which says what head was expected.
        not_read: Names that the folder may have beside them.
    """
    missing = [name for name in shapes if name not in stored]
    others = [name for name in stored if name not in shapes and name not in not_read]
    if missing or others:
        raise ConfigError(
            f"{folder}: speculative_model_dir lacks {_some(missing)} and has {_some(others)} beside what is "
            f"known, {kind}"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ConfigError(
                f"{folder}: tensor {name!r} has shape {list(stored[name].shape)}, expected {list(shape)} from "
                "config.json of the head"
            )
        dtypes = ("I64", "I32") if name == of_token_ids else ("F32", "BF16", "F16")
        if stored[name].dtype not in dtypes:
            raise ConfigError(
                f"{folder}: tensor {name!r} has dtype {stored[name].dtype}, expected {' or '.join(dtypes)}"
            )


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "no tensor"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
