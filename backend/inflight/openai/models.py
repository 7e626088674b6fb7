"""/v1/models: the served model and its LoRA adapters. Runs on the event loop."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from inflight.errors import Unavailable
from inflight.openai.context import contexts_of
from inflight.openai.serving_model import ServingModel, unknown_model

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the model and its adapters, by all names that a body's field `model` may have."""
    return {"object": "list", "data": await _listed(request)}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """Return one model or adapter."""
    listed = await _listed(request)
    for model in listed:
        if model["id"] == name:
            return model
    raise unknown_model(name, [model["id"] for model in listed])


async def _listed(request: Request) -> list[dict[str, Any]]:
    """Return the models and adapters of all engines that can be reached; raise Unavailable if none can."""
    contexts = contexts_of(request)

    def find() -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        away: Unavailable | None = None
        for context in contexts:
            try:
                listed = _models(context.model)
            except Unavailable as error:
                away = away or error
                continue
            for model in listed:
                found.setdefault(model["id"], model)
        if away is not None and not found:
            raise away
        return list(found.values())

    return await contexts[0].session.wait_for(find)


def _models(model: ServingModel) -> list[dict[str, Any]]:
    base, limits = model.names[0], model.describe().limits

    def entry(name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": _STARTED,
            "owned_by": "inflight",
            "root": root,
            "parent": parent,
            "max_model_len": limits.max_sequence_length,
        }

    own = [entry(name, base, None) for name in model.names]
    usable = (state for state in model.adapters() if not state.problem)
    return own + [entry(state.name, state.path or state.name, base) for state in usable]
