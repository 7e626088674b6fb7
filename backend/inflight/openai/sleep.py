"""/sleep, /wake_up and /is_sleeping, compatible with vLLM. Runs on the event loop.

All are refused unless the operator sets `enable_sleep_mode`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight.core.request.sleep import SleepAction
from inflight.errors import Unsupported
from inflight.openai.context import Context, choose_context, contexts_of, refuse_other_sites
from inflight.openai.errors import ApiError, invalid

router = APIRouter()
_LEVELS = ("1", "2")
_MODES = ("wait", "abort")
_TAGS = {"weights", "kv_cache"}
_WEIGHTS = {"weights"}
_TIMEOUT_S = 600.0
"""Seconds to wait for requests in flight, or for the model to load."""


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Finish or cancel the requests in flight, refuse new ones, and give back the weights, and the KV cache
    unless `tags` is weights."""
    _check_names(request, "level", "mode", "tags", "model")
    _check_one_of(request, "level", _LEVELS)
    _check_one_of(request, "mode", _MODES)
    aborts = request.query_params.get("mode") == "abort"
    only_weights = _are_only_weights(request, "the KV cache is not given back without the weights")
    await _command(request, SleepAction.ABORT if aborts else SleepAction.SLEEP, only_weights)
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Load the model again and accept requests."""
    _check_names(request, "tags", "model")
    only_weights = _are_only_weights(request, "the KV cache does not come back without the weights")
    await _command(request, SleepAction.WAKE_UP, only_weights)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps, or refuses requests to fall asleep: `{"is_sleeping": false}`."""
    _check_names(request, "model")
    return JSONResponse({"is_sleeping": await _command(request, SleepAction.ASK)})


def _check_names(request: Request, *known: str) -> None:
    if others := sorted(request.query_params.keys() - set(known)):
        name = others[0][:200]
        raise invalid(name, f"the query parameter {name} is unknown, expected {', '.join(known)}")


def _check_one_of(request: Request, name: str, allowed: tuple[str, ...]) -> None:
    value = request.query_params.get(name, allowed[0])
    if value not in allowed:
        raise invalid(name, f"{name} is {value[:200]!r}, expected {' or '.join(allowed)}")


def _are_only_weights(request: Request, problem: str) -> bool:
    """Return whether the parameter `tags` names the weights alone; without it, the KV cache is included."""
    tags = request.query_params.getlist("tags")
    if tags and set(tags) not in (_TAGS, _WEIGHTS):
        raise invalid("tags", f"tags is {tags}, expected weights, or weights and kv_cache: {problem}")
    return set(tags) == _WEIGHTS


async def _command(request: Request, action: SleepAction, only_weights: bool = False) -> bool:
    refuse_other_sites(request)
    contexts, name = contexts_of(request), request.query_params.get("model")

    def find() -> Context:
        context = choose_context(contexts, name)
        if not context.model.describe().sleep_enabled:
            raise ApiError(
                "this server does not let clients make the engine sleep: start it with --set "
                "enable_sleep_mode=true",
                403,
                None,
                "sleep_mode_disabled",
            )
        # With one engine, choose_context accepts any name; this raises the error of an unknown one.
        context.model.adapter_of(name)
        return context

    context = await contexts[0].session.wait_for(find)

    def run() -> bool:
        try:
            return context.session.client.sleep(action, _TIMEOUT_S, only_weights)
        except Unsupported as error:
            raise ApiError(str(error), 400, None, "unsupported_engine") from None

    if action is SleepAction.ASK:
        return await context.session.wait_for(run)
    # A command may take minutes: of an engine's commands, one has a thread, and the others wait without one.
    async with context.sleep_turn:
        return await context.session.wait_for(run)
