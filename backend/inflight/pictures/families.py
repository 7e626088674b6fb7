"""The families of models whose pictures are encoded. Standard library only."""

from __future__ import annotations

from pathlib import Path

from inflight.checkpoint_config import read_config_file
from inflight.errors import ConfigError
from inflight.json_values import is_object

MODEL_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "llava",
    "mistral3",
    "idefics3",
    "smolvlm",
    "internvl",
    "llava_onevision",
)
"""Model types whose pictures are encoded."""

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def why_not(model_type: str) -> str | None:
    """Return why pictures of a model type cannot be encoded; None if they can."""
    if model_type.startswith("gemma"):
        return (
            f"pictures of {model_type} are not served: the tokens of a picture attend to each other in both "
            "directions, which this engine's attention does not do"
        )
    if model_type == "lfm2_vl":
        return (
            "pictures of lfm2_vl are not served: transformers processes them by torchvision, which is not "
            "installed beside this torch"
        )
    if model_type not in MODEL_TYPES:
        return f"pictures of {model_type} are not served; expected one of {', '.join(MODEL_TYPES)}"
    return None


def has_vision_tower(folder: Path) -> bool:
    """Whether a checkpoint has a vision tower, a processor, and a family whose pictures can be encoded."""
    try:
        config = read_config_file(folder)
    except ConfigError:  # the engine reports it
        return False
    model_type = config.text_or_none("model_type") or ""
    has_processor = any((folder / name).is_file() for name in _PROCESSORS)
    return has_processor and is_object(config.value("vision_config")) and why_not(model_type) is None
