"""Errors in OpenAI's format, and their HTTP statuses. Runs on the event loop.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` is the invalid field of the body; it is null if no field is invalid, or the field is not known. Below
/v1/messages, `refusal` returns errors in Anthropic's format.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import pydantic
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from inflight.core.request.sampling_config import CONTROLS
from inflight.errors import (
    BadAdapter,
    InflightError,
    InvalidArgument,
    NotStarted,
    QueueFull,
    TooLong,
    Unavailable,
    Unreachable,
    Unsupported,
    unexpected,
)
from inflight.near_words import nearest
from inflight.openai.messages.error_format import in_anthropics_format, is_of_messages

_log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
_SHOWN = 100
"""Largest number of characters, or of list items, of a client's value that a message repeats."""
_MAX_MESSAGE = 1500
"""Largest number of characters of a message."""
_STATUS = {
    "ALREADY_EXISTS": 409,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "CANCELLED": CLIENT_CLOSED_REQUEST,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# Field of the body by tensor: errors of the engine name tensors, which clients of this endpoint do not know.
_FIELD_OF_TENSOR = {
    **{each.tensor: each.body.name for each in CONTROLS.values() if each.body},
    "request_output_len": "max_tokens",
    "input_ids": "prompt",
    "num_top_log_probs": "logprobs",
    "stop_words_list": "stop",
    "bad_words_list": "bad_words",
    "end_id": "stop_token_ids",
    "guided_decoding_guide_type": "structured_outputs",
    "guided_decoding_guide": "structured_outputs",
    "lora_task_id": "model",
    "lora_name": "model",
}

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's error code for a prompt that is too long. Clients shorten their prompt when they get it."""


class ApiError(InflightError):
    """An error that only OpenAI's protocol has.

    Args:
        message: Description with the received and the expected value.
        status: HTTP status.
        param: Field of the body.
        code: OpenAI's error code.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.error_code = status, param, code


def invalid(param: str, message: str) -> ApiError:
    """Return an error about an invalid field of the body."""
    return ApiError(message, 400, param, "invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return an error about a known field of the body that is not supported."""
    return ApiError(message, 400, param, "unsupported_parameter")


def in_fields(error: InvalidArgument | Unsupported, fields: Mapping[str, str] = {}) -> ApiError:
    """Convert an error of the engine's checks, which names tensors, to an error that names fields of the body.

    The error's `param` is the first field that the message names, or `model` for an invalid adapter.

    Args:
        error: Error of the engine.
        fields: Field by tensor, for tensors whose field depends on the body.
    """
    fields = {**_FIELD_OF_TENSOR, **fields}
    error = _without_tables(error)
    named = error.with_names(lambda name: fields.get(name, name))
    code = "unsupported_parameter" if isinstance(error, Unsupported) else "invalid_value"
    if isinstance(error, TooLong):
        code = CONTEXT_LENGTH_EXCEEDED
    param = "model" if isinstance(error, BadAdapter) else next((name.root for name in named.names), None)
    return ApiError(str(named), 400, param, code)


def _without_tables(error: InvalidArgument | Unsupported) -> InvalidArgument | Unsupported:
    """Return an error without its last clause if that is about a prompt table, which this protocol lacks."""
    if "prompt_embedding_table" not in error.args[1:]:
        return error
    *before, clause = error.args[: error.args.index("prompt_embedding_table")]
    return type(error)(*before, clause.rpartition("; ")[0])


@contextmanager
def renamed_errors(rename: Callable[[ApiError], ApiError]) -> Generator[None]:
    """Convert errors about a body that was made from another protocol's body.

    Args:
        rename: Function that returns the error with the names of the other body's fields.
    """
    try:
        yield
    except (InvalidArgument, Unsupported) as error:
        raise rename(in_fields(error)) from None
    except ApiError as error:
        raise rename(error) from None


def describe_error(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, body) of the response for an error.

    A request is cancelled (asyncio.CancelledError) if the server ends and gives it no more time.
    """
    if isinstance(error, asyncio.CancelledError):
        error = Unavailable("the server is shutting down")
    if isinstance(error, InvalidArgument | Unsupported):
        error = in_fields(error)
    if isinstance(error, UnicodeEncodeError):  # JSON allows half of a surrogate pair, UTF-8 does not
        error = ApiError(f"a text in the body is not Unicode: {error.reason} at character {error.start}")
    if isinstance(error, ApiError):
        return error.status, error_body(error.status, str(error), error.param, error.error_code)
    if isinstance(error, Unreachable):
        is_loading = isinstance(error, NotStarted)
        if not is_loading:  # otherwise the client of the engine has logged that it waits
            _log_once(str(error))
        state = "the model is still loading" if is_loading else "the engine cannot be reached now"
        error = Unavailable(f"{state}; a later attempt may succeed")
    if isinstance(error, InflightError):
        status = 429 if isinstance(error, QueueFull) else _STATUS.get(error.code, 500)
        return status, error_body(status, str(error), None, error.code.lower())
    assert isinstance(error, Exception), f"got {type(error).__name__}, which has no response"
    return 500, error_body(500, str(unexpected("the server failed", error)), None, "internal_error")


@lru_cache(maxsize=1)
def _log_once(message: str) -> None:
    """Log a message for the operator that clients do not get. A repeated message is logged once."""
    _log.warning("%s", message)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's object for an error. A long message is truncated, as it may repeat a client's values."""
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "…"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException, path: str) -> JSONResponse:
    """Return the response for an error of a request to `path`.

    If the error may be temporary, the response has a Retry-After header.
    """
    status, body = describe_error(error)
    return refusal(path, status, body, {"Retry-After": "1"} if status in (429, 503) else None)


def refusal(
    path: str, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a response with an error, in the format that clients of the path expect.

    Args:
        path: Path of the request.
        status: HTTP status.
        body: OpenAI's object for the error, as `error_body` returns it.
        headers: Headers of the response.
    """
    told = in_anthropics_format(status, body) if is_of_messages(path) else body
    return JSONResponse(told, status, headers)


def add_error_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Register handlers that return every error in OpenAI's format.

    Args:
        app: The application.
        paths: Paths of its routes, of which the nearest is named for a path that is not among them.
    """
    routes = sorted(path for path in paths if "{" not in path)

    async def of_engine(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}{_other_route(routes, request, error)}"
        body = error_body(error.status_code, message)
        return refusal(request.url.path, error.status_code, body, error.headers)

    app.add_exception_handler(InflightError, of_engine)
    app.add_exception_handler(UnicodeEncodeError, of_engine)
    app.add_exception_handler(Exception, of_engine)
    app.add_exception_handler(HTTPException, of_http)


def _other_route(routes: Sequence[str], request: Request, error: HTTPException) -> str:
    """Return a hint to the method or the route that the client meant, for the end of a message; "": none."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"; send {allowed}" if allowed else ""
    path = request.url.path[:_SHOWN]
    if path.startswith("/v2/"):
        return "; Triton's protocol is served at another port (--http-port)"
    if path.rstrip("/") == "/v1":
        return ": this is the base URL for clients; GET /v1/models lists the models"
    near = nearest(path, routes)
    return f"; did you mean {near}?" if near else ""


def validation_error(error: pydantic.ValidationError) -> ApiError:
    """Convert pydantic's error about a body to an ApiError. Any thread."""
    errors: list[Any] = error.errors(include_url=False)
    first = errors[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, _Refused):
        return raised.error_in(_path(first["loc"])) if first["loc"] else raised.error
    places: list[int | str] = list(first["loc"])
    if not places:
        return ApiError(f"the body: expected an object, got {_shown(first)}", 400, None, "invalid_value")
    if first["type"] == "missing":
        return ApiError(f"{_path(places)} is required", 400, _param(places), "missing")
    message = _message(first)
    if places and places[-1] in _KINDS:  # a field of several types, with one error for each
        field, place = first["loc"][:-1], len(first["loc"]) - 1
        kinds = [_KINDS.get(str(one["loc"][place]), "") for one in errors if one["loc"][:place] == field]
        message = f"expected {' or '.join(filter(None, kinds))}, got {_shown(first)}"
        places.pop()
    return ApiError(f"{_path(places) or 'the body'}: {message}", 400, _param(places), "invalid_value")


# Descriptions of the types that a field with several types may have, by pydantic's names of the types.
_KINDS = {
    "str": "a text",
    "bool": "true or false",
    "literal['never']": '"never"',
    "dict[str,any]": "an object",
    "list[str]": "a list of texts",
    "list[dict[str,any]]": "a list of objects",
    "list[constrained-int]": "a list of token ids",
    "list[list[constrained-int]]": "a list of such lists",
}


# Expected values, by pydantic's names of errors; {} are the limits in the error.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "string_type": "a text",
    "too_long": "{max_length} or fewer values",
    "too_short": "{min_length} or more values",
}


def _message(error: dict[str, Any]) -> str:
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return f"{error['msg'].lower()}, got {_shown(error)}"
    context: dict[str, Any] = error.get("ctx", {})
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
    return f"expected {expected.format(**limits)}, got {_shown(error)}"


def _shown(error: dict[str, Any]) -> str:
    value = error.get("input")
    if isinstance(value, list):  # the beginning of a long list is enough
        value = cast(list[Any], value)[:_SHOWN]
    elif isinstance(value, dict):
        value = dict(islice(cast(dict[Any, Any], value).items(), _SHOWN))
    try:
        shown = json.dumps(value[:_SHOWN] if isinstance(value, str) else value, ensure_ascii=False)
    except (TypeError, ValueError):
        shown = repr(value)
    return shown if len(shown) < _SHOWN else shown[:_SHOWN] + "…"


def _param(places: Sequence[int | str]) -> str | None:
    return str(places[0]) if places else None


def _path(places: Sequence[int | str]) -> str:
    """Return the path of a value in the body, such as messages[0].content."""
    parts = [f"[{place}]" if isinstance(place, int) else f".{place}" for place in places]
    return "".join(parts).removeprefix(".")


class _Refused(ValueError):
    """Wraps an ApiError that a pydantic validator raises, because pydantic passes on ValueErrors only.

    Attributes:
        error: The error, with the field's name in an object of the body.
    """

    def __init__(self, error: ApiError, is_of_field: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self._is_of_field = is_of_field

    def error_in(self, path: str) -> ApiError:
        """Return the error with the field's name in the body, if the object is the one at `path`."""
        error, name = self.error, self.error.param
        if not self._is_of_field or name is None:
            return error
        message = str(error).replace(f"{name}:", f"{path}.{name}:", 1)
        return ApiError(message, error.status, path.partition(".")[0].partition("[")[0], error.error_code)


def refused(error: ApiError, is_of_field: bool = False) -> ValueError:
    """Wrap `error` so that a validator may raise it.

    Args:
        error: The error.
        is_of_field: Whether its message names a field as `name:`, without the object that has the field.
    """
    return _Refused(error, is_of_field)
