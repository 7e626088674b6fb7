"""Descriptions of models with a draft head: the checkpoint's own, or that of another folder."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import is_gemma4_head
from inflight.file_names import native
from inflight.models.eagle_head import with_eagle_head
from inflight.models.gemma4_head import with_gemma4_head
from inflight.models.registry import ModelDescription, check_draft_head


def with_wanted_head(model: ModelDescription, folder: str | None, wants_own_head: bool) -> ModelDescription:
    """Return the description with the configured draft head, if any.

    Args:
        model: The description without a head.
        folder: `EngineConfig.draft_head_dir`, the folder of a head that is not part of the checkpoint.
        wants_own_head: `EngineConfig.has_draft_head`. Without a folder, the head is the checkpoint's own.

    Raises:
        ConfigError: The model cannot have this head.
    """
    if folder is not None:
        return with_head_folder(model, native(folder))
    if not wants_own_head:
        return model
    check_draft_head(model)
    return replace(model, decoder=replace(model.decoder, has_draft_head=True))


def with_head_folder(model: ModelDescription, folder: str) -> ModelDescription:
    """Return the description with the head of a folder, of the kind that its config.json names.

    Raises:
        ConfigError: As `with_gemma4_head` and `with_eagle_head`.
    """
    return (with_gemma4_head if is_gemma4_head(folder) else with_eagle_head)(model, folder)
