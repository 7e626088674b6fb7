"""Whether this server or transformers has code for a checkpoint's family, judged by config.json.

The registry of families reads config.json as when the model is loaded, and refuses what a load would refuse.
transformers' names of decoders are read from its source, because importing it would import torch. One thread.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import CheckpointFacts, ConfigFile
from inflight.errors import ConfigError
from inflight.extras import how_to_install
from inflight.models.registry import UnknownFamily, describe
from inflight.models.unserved import UNSERVED
from inflight.multimodal import MULTIMODAL, other_inputs

_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_NAMES_FILE = "models/auto/modeling_auto.py"
_KIND = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")  # what a class computes, at the end of its name
_MAX_NEAR, _MIN_SIMILARITY = 2, 0.8
_INSTALL = how_to_install("transformers")


def refused_by_family(config: ConfigFile, implementation: str | None) -> str | None:
    """Return why no code here computes the checkpoint; None if some does, or if only a load can tell.

    Args:
        config: Its config.json.
        implementation: The parameter `engine`.
    """
    if implementation == "tensorrt":
        return None
    if implementation == "transformers":
        reason = _refused_by_transformers(config)
        return None if reason is None else f"{config.path.parent} is {_name(config)}, and {reason}"
    try:
        describe(config)
        return None
    except UnknownFamily as error:
        unknown = error
    except ConfigError as error:
        return str(error)
    reason = "" if implementation == "torch" else _refused_by_transformers(config)
    if reason is None:
        return None
    reasons = f"{_refused_here(config, unknown)}{', and ' if reason else ''}{reason}"
    return f"{reasons}; docs/models.md lists the families"


def runs_by_transformers(config: ConfigFile, implementation: str | None) -> bool:
    """Whether transformers' own code would run the checkpoint: on request, or as no family here has it."""
    if implementation is not None:
        return implementation == "transformers"
    try:
        describe(config)
    except UnknownFamily:
        return True
    except ConfigError:
        pass  # loading the model reports it
    return False


def _refused_here(config: ConfigFile, unknown: UnknownFamily) -> str:
    """Return why the registry does not know the family, with the names that are most similar to it."""
    if not unknown.known:
        return str(unknown)
    is_part = config.text_part().multimodal is not None
    name = f"{_name(config)} with a text part of type {unknown.family}" if is_part else _name(config)
    near = _near(unknown.family, [*unknown.known, *(each.architecture for each in MULTIMODAL)])
    hint = f" (most similar: {' and '.join(near)})" if near else ""
    families = f"none of the {len(unknown.known)} families of this server{hint}"
    return f"{config.path.parent} is {name}, which is {families}"


def _name(config: ConfigFile) -> str:
    facts = CheckpointFacts(config)
    is_named = bool(config.texts("architectures") or facts.model_type)
    return facts.name if is_named else "a model without architectures and model_type in config.json"


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names that are spelled most like `name`, apart from capitals and common endings."""
    by_stem = {_stem(each): each for each in reversed(known)}
    found = difflib.get_close_matches(_stem(name), list(by_stem), _MAX_NEAR, _MIN_SIMILARITY)
    return [by_stem[stem] for stem in found]


def _stem(name: str) -> str:
    return _KIND.sub("", name).lower()


def _refused_by_transformers(config: ConfigFile) -> str | None:
    """Return why transformers' own code does not run the checkpoint; None if it may."""
    kind = config.text_or_none("model_type")
    if needed := UNSERVED.get(kind or ""):
        return f"transformers' own code cannot serve it here: it needs {needed}"
    if inputs := other_inputs(config.values):
        return f"transformers' own code is used for models of text alone, not with {', '.join(inputs)}"
    names = _transformers_decoders()
    if names is None:
        return f"transformers, whose own code may run it, is not installed: {_INSTALL}"
    if not names or kind in names:
        return None
    own = ", and code that comes with a checkpoint (auto_map) is never run" if config.has("auto_map") else ""
    version = metadata.version("transformers")
    return f"transformers {version} has no decoder of text for {kind or 'a model without model_type'}{own}"


def _transformers_decoders() -> Mapping[str, Any] | None:
    """Return transformers' classes of decoders by model_type.

    Empty if this version of transformers lists them in another way, None if it is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        try:
            module = ast.parse((Path(folder) / _NAMES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in module.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _DECODERS:
                return _pairs(node.value)
    return {}


def _pairs(value: ast.expr) -> Mapping[str, Any]:
    """Return the content of `OrderedDict([(key, value), …])`; {} for any other expression."""
    try:
        return dict(ast.literal_eval(value.args[0])) if isinstance(value, ast.Call) else {}
    except (ValueError, TypeError, IndexError):
        return {}
