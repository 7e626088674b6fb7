"""Descriptions of models with a draft head: the checkpoint's own, or that of another folder."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import is_gemma4_head
from inflight.models.eagle_head import with_eagle_head
from inflight.models.gemma4_head import with_gemma4_head
from inflight.models.registry import ModelDescription, check_draft_head


def with_head_folder(model: ModelDescription, folder: str) -> ModelDescription:
    """Return the description of a model with the draft head in `folder`: of Gemma 4, or else an EAGLE-3 head.

    Raises:
        ConfigError: As `with_gemma4_head` and `with_eagle_head`.
    """
    return (with_gemma4_head if is_gemma4_head(folder) else with_eagle_head)(model, folder)


def with_draft_head(model: ModelDescription) -> ModelDescription:
    """Return the description with the checkpoint's draft head; raise ConfigError if the family has none."""
    check_draft_head(model)
    return replace(model, decoder=replace(model.decoder, has_draft_head=True))
