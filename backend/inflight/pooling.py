"""The task for which a checkpoint is served: to generate text, to embed or classify texts, or to score pairs.

Reads the files with which sentence-transformers describes an embedding model: `modules.json`, and the
`config.json` of its pooling. Imports only the standard library; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from inflight.checkpoint_config import ConfigFile, read_json
from inflight.errors import ConfigError
from inflight.json_values import is_list, is_object

CONVERSIONS = ("auto", "none", "embed", "classify")
"""Values of the flag --convert, named as in vLLM."""

POOLED_OUTPUT = "last_hidden_state"
"""The additional output of the engine of which embeddings and classes are made."""

CLASSIFICATION_HEAD = "score.weight"
"""The tensor with a row for each class, in checkpoints for sequence classification."""

_CLASSIFIER = "ForSequenceClassification"
"""The end of the names of transformers' classes that classify texts."""

_MODULES = "modules.json"
_MODE = "pooling_mode_"
_LAST = "lasttoken"
_SERVED = ("Transformer", "Pooling", "Normalize")


class Task(Enum):
    """The kind of answers that a server gives to requests to /v1.

    EMBED and CLASSIFY need `POOLED_OUTPUT`. CLASSIFY: by the checkpoint's classification head. RERANK: by the
    probability of the token "yes".
    """

    GENERATE = auto()
    EMBED = auto()
    CLASSIFY = auto()
    RERANK = auto()

    @property
    def pools(self) -> bool:
        """Return whether answers are computed from `POOLED_OUTPUT`, without an output projection."""
        return self in (Task.EMBED, Task.CLASSIFY)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How an embedding is made from the last hidden state of a text's last token.

    Attributes:
        normalizes: Whether an embedding has length 1.
    """

    normalizes: bool = True


def find_task(folder: Path, convert: str) -> Task:
    """Return the task for which a checkpoint is served.

    Args:
        folder: The checkpoint's folder.
        convert: One of CONVERSIONS; with "auto", a checkpoint for sequence classification classifies, and one with
            a pooling of sentence-transformers is for embeddings.

    Raises:
        ConfigError: Texts are to be embedded, and the checkpoint has a pooling or a module that is not served.
    """
    if convert == "none":
        return Task.GENERATE
    if convert in ("auto", "classify") and _is_classifier(folder):
        return Task.CLASSIFY
    if convert == "classify":
        return Task.RERANK
    return Task.EMBED if read_pooling(folder) is not None or convert == "embed" else Task.GENERATE


def _is_classifier(folder: Path) -> bool:
    try:
        return any(map(classifies, ConfigFile.load(folder / "config.json").texts("architectures")))
    except ConfigError:  # loading the model reports it
        return False


def classifies(architecture: str) -> bool:
    """Return whether a class of transformers classifies texts."""
    return architecture.endswith(_CLASSIFIER)


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling that a checkpoint's `modules.json` describes; None if it describes none.

    Raises:
        ConfigError: The pooling is not that of the last token, or there is a module of another kind; the message
            has the file, and what it says.
    """
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        return None
    for kind in kinds:
        if kind not in _SERVED:
            raise ConfigError(
                f"{folder / _MODULES} has the module {kind}, expected {', '.join(_SERVED)}: no other module of "
                "sentence-transformers is served"
            )
    path = folder / next(path for kind, path in modules if kind == "Pooling") / "config.json"
    modes = _pooling_modes(path)
    if modes != [_LAST]:
        raise ConfigError(
            f"{path} has the pooling {' and '.join(modes) or 'none'}, expected {_LAST}: an embedding is the "
            "hidden state of the last token, and no other pooling is served"
        )
    return Pooling("Normalize" in kinds)


def has_pooling(folder: Path) -> bool:
    """Return whether a checkpoint's `modules.json` describes a pooling, served or not."""
    return any(kind == "Pooling" for kind, _ in _modules(folder))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class without its package, folder) of each module; empty without a file of this form."""
    path = folder / _MODULES
    try:
        modules = read_json(path)
    except FileNotFoundError:
        return []
    found: list[tuple[str, str]] = []
    for module in modules if is_list(modules) else ():
        kind, of = (module.get("type"), module.get("path", "")) if is_object(module) else (None, "")
        if not isinstance(kind, str) or not isinstance(of, str):
            raise ConfigError(f"{path} is {modules!r}, expected a list of objects with type and path")
        found.append((kind.rpartition(".")[2], of))
    return found


def _pooling_modes(path: Path) -> list[str]:
    """Return the modes of a pooling's config.json, in its newer or its older form."""
    config = ConfigFile.load(path)
    if (mode := config.text_or_none("pooling_mode")) is not None:
        return [mode]
    keys = [key for key in config.values if key.startswith(_MODE) and config.boolean(key, False)]
    return [key.removeprefix(_MODE) for key in keys]
