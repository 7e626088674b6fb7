"""The folder of a draft head that is not part of the model's checkpoint: which kind of head it has."""

from __future__ import annotations

from inflight.checkpoint_config import is_gemma4_head
from inflight.models.eagle_head import with_eagle_head
from inflight.models.gemma4_head import with_gemma4_head
from inflight.models.registry import ModelDescription


def with_head_folder(model: ModelDescription, folder: str) -> ModelDescription:
    """Return the description of a model with the draft head in `folder`: of Gemma 4, or else an EAGLE-3 head.

    Raises:
        ConfigError: As `with_gemma4_head` and `with_eagle_head`.
    """
    return (with_gemma4_head if is_gemma4_head(folder) else with_eagle_head)(model, folder)
