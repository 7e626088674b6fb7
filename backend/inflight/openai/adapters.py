"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM. Runs on the event loop.

Both are refused unless the operator has set `enable_adapter_commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.errors import InvalidArgument, Unsupported
from inflight.openai.bodies import body_as
from inflight.openai.context import Context, choose_context, contexts_of
from inflight.openai.errors import ApiError, invalid
from inflight.openai.protocol import Body
from inflight.openai.serving_model import ServingModel

router = APIRouter()


class LoadAdapterBody(Body):
    """The JSON body of a request to /v1/load_lora_adapter.

    Attributes:
        lora_name: The adapter's name in the field `model` of requests.
        lora_path: The adapter's folder, below the server's `lora_dir`.
        load_inplace: Whether to replace an adapter that is loaded already.
        model: The one of several models that the adapter is for; None: the model that has an adapter of this
            name, or else the first one.
    """

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "is_3d_lora_weight": ((False,), "the form of an adapter's weights is found by itself")
    }
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterBody(Body):
    """The JSON body of a request to /v1/unload_lora_adapter; `model` as in LoadAdapterBody."""

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "lora_int_id": ((), "adapters are named by lora_name alone; leave it out")
    }
    lora_name: str = Field(min_length=1)
    model: str | None = None


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(
    body: Annotated[LoadAdapterBody, body_as(LoadAdapterBody)], request: Request
) -> Response:
    """Read an adapter and give it a name, which requests may use from then on."""
    return await _answer(request, body, lambda chosen: _load(contexts_of(request), chosen, body))


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: Annotated[UnloadAdapterBody, body_as(UnloadAdapterBody)], request: Request
) -> Response:
    """Drop an adapter. Requests that use it continue, and its memory is freed when the last of them has ended."""
    return await _answer(request, body, lambda chosen: _unload(chosen.model, body))


async def _answer(
    request: Request, body: LoadAdapterBody | UnloadAdapterBody, command: Callable[[Context], str]
) -> Response:
    contexts = contexts_of(request)

    def run() -> str:
        context = _choose(contexts, body)
        if not context.model.describe().adapter_commands_enabled:
            raise ApiError(
                "this server does not let clients load and unload adapters: start it with --set "
                "enable_adapter_commands=true",
                403,
                None,
                "adapter_commands_disabled",
            )
        try:
            return command(context)
        except (InvalidArgument, Unsupported) as error:
            raise ApiError(str(error), 400, "lora_path", "invalid_value") from None

    return PlainTextResponse(await contexts[0].session.wait_for(run))


def _choose(contexts: Sequence[Context], body: LoadAdapterBody | UnloadAdapterBody) -> Context:
    if body.model is not None:
        context = choose_context(contexts, body.model)
        context.model.adapter_of(body.model)  # with one engine, this raises the error of an unknown name
        return context
    return next((each for each in contexts if _has(each, body.lora_name)), contexts[0])


def _has(context: Context, name: str) -> bool:
    return name in context.model.known_names() or context.model.has_adapter(name)


def _load(contexts: Sequence[Context], chosen: Context, body: LoadAdapterBody) -> str:
    model, name, path = chosen.model, body.lora_name, body.lora_path
    if any(_has(each, name) for each in contexts if each is not chosen):
        raise invalid("lora_name", f"lora_name is {name[:200]!r}, which another model of this server has")
    if name in model.names:
        raise invalid("lora_name", f"lora_name is {name[:200]!r}, which is the model itself")
    known = next((state for state in model.adapters() if state.name == name), None)
    if known is not None and known.is_loaded and not body.load_inplace:
        raise invalid("lora_name", f"the adapter {name[:200]!r} is already loaded: load_inplace replaces it")
    if known is not None and known.path == path:
        path = ""  # the operator may have named a folder outside of lora_dir
    model.command_adapters(AdapterCommand(AdapterAction.LOAD, name, path=path, replaces=body.load_inplace))
    return f"Success: LoRA adapter '{name}' added successfully."


def _unload(model: ServingModel, body: UnloadAdapterBody) -> str:
    model.command_adapters(AdapterCommand(AdapterAction.UNLOAD, body.lora_name))
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
