"""The families of models whose pictures are encoded. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import read_config_file
from inflight.errors import ConfigError
from inflight.extras import how_to_install
from inflight.json_values import is_object

MODEL_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "llava",
    "llava_next",
    "mistral3",
    "idefics3",
    "smolvlm",
    "internvl",
    "llava_onevision",
    "gemma3",
    "gemma4",
    "gemma4_unified",
)
"""Model types whose pictures are encoded."""

TOWER_DTYPES = ("float32", "float16", "bfloat16")
"""Data types of a vision tower."""
INSTALL_PICTURES = how_to_install("pictures")
"""How to install what encodes pictures."""
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def why_not(values: Mapping[str, Any]) -> str | None:
    """Return why pictures of a checkpoint cannot be encoded; None if they can. `values`: its config.json."""
    model_type = values.get("model_type")
    if model_type == "lfm2_vl":
        return (
            "pictures of lfm2_vl are not served: transformers processes them by torchvision alone, which "
            "cannot be imported beside a torch for CPUs"
        )
    if model_type not in MODEL_TYPES:
        return f"pictures of {model_type} are not served; expected one of {', '.join(MODEL_TYPES)}"
    return None


def missing_packages() -> list[str]:
    """Return the packages that encode pictures and are not installed."""
    packages = {"transformers": "transformers", "PIL": "Pillow"}
    return [name for module, name in packages.items() if find_spec(module) is None]


def can_encode(folder: Path) -> bool:
    """Whether a checkpoint has a vision tower (`has_vision_tower`) and what encodes pictures is installed."""
    return has_vision_tower(folder) and not missing_packages()


def has_vision_tower(folder: Path) -> bool:
    """Whether a checkpoint has a vision tower, a processor, and a family whose pictures can be encoded."""
    try:
        values = read_config_file(folder).values
    except ConfigError:  # the engine reports it
        return False
    has_processor = any((folder / name).is_file() for name in _PROCESSORS)
    return has_processor and is_object(values.get("vision_config")) and why_not(values) is None
