"""Every error this package raises on purpose, and the Triton code each one travels with.

    InflightError                     INTERNAL
    ├── RequestError                  one request is at fault; nothing else is touched
    │   ├── InvalidArgument           INVALID_ARG
    │   ├── Unsupported               UNSUPPORTED
    │   ├── AlreadyExists             ALREADY_EXISTS
    │   ├── NotFound                  NOT_FOUND
    │   ├── Unavailable               UNAVAILABLE
    │   ├── Cancelled                 CANCELLED
    │   └── StepFailed                INTERNAL: the iteration that carried the request raised
    └── ConfigError                   INTERNAL: the model does not load

The code is the name of a `TritonError` constant, so that no layer below `inflight.triton` needs Triton to
choose one. `error_from_code` rebuilds an error that crossed a process boundary; `error_to_plain` and
`error_from_plain` are for whole values that have errors in them. Errors of the Executor API, which travel with
none, are in `executor/errors.py`.
"""

from __future__ import annotations

import re
from typing import Any

from inflight.file_names import readable

_PLACES = re.compile(
    r"(?<![\w/.])/[\w.+@~-]+(?:/[^\s'\":,;)]*)+"  # a path of two parts and more
    r"|inflight-server-\w[\w-]*|\w*shm_region\w*"  # names in /dev/shm, this server's and Triton's own
)


class InflightError(Exception):
    """Base of the tree. `code` is the name of the Triton error code."""

    code = "INTERNAL"

    def __str__(self) -> str:
        return readable(super().__str__())


class RequestError(InflightError):
    """One request failed; every other request goes on untouched."""


class InvalidArgument(RequestError):
    """The request can never work as it was sent."""

    code = "INVALID_ARG"


class Unsupported(RequestError):
    """The request asks for something this server declares and does not do."""

    code = "UNSUPPORTED"


class AlreadyExists(RequestError):
    """Another request with this id is in flight."""

    code = "ALREADY_EXISTS"


class NotFound(RequestError):
    """Something the request names does not exist."""

    code = "NOT_FOUND"


class Unavailable(RequestError):
    """The server cannot take the request now; a later try may work."""

    code = "UNAVAILABLE"


class Unreachable(Unavailable):
    """The engine is away. The log says where it was looked for, and this message does not: clients read it."""


class Cancelled(RequestError):
    """The client cancelled the request or went away."""

    code = "CANCELLED"


class StepFailed(RequestError):
    """The iteration that carried the request raised an exception."""


class ConfigError(InflightError):
    """A parameter, checkpoint or environment the model cannot load with."""


_BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (InvalidArgument, Unsupported, AlreadyExists, NotFound, Unavailable, Cancelled, StepFailed)
}

ERROR_CODES: tuple[str, ...] = tuple(_BY_CODE)
"""Every code a request can fail with."""


def error_from_code(code: str, message: str) -> RequestError:
    """The error that `code` and `message` describe; an unknown code becomes `StepFailed`."""
    return _BY_CODE.get(code, StepFailed)(message)


def error_to_plain(value: object) -> tuple[str, str]:
    """An error as its code and message: what encoders call for values that they do not know (`enc_hook`)."""
    if isinstance(value, InflightError):
        return value.code, str(value)
    # msgspec expects this error of a hook that does not know a type: that is a defect of the program, not of data.
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be encoded")


def error_from_plain(kind: type, value: Any) -> RequestError:
    """The error that `error_to_plain` made plain: what decoders call for such fields (`dec_hook`)."""
    if not issubclass(kind, InflightError):
        # As above. A ValueError would become msgspec's ValidationError, which is about data.
        raise NotImplementedError(f"a value of type {kind.__name__} cannot be decoded")
    match value:
        case [str(code), str(message)]:
            return error_from_code(code, message)
        case _:
            raise ValueError(f"expected an error's code and message, got {value!r}")


def without_places(text: str) -> str:
    """A text for clients, without what it names of this machine: paths, sockets and regions of shared memory."""
    return _PLACES.sub("…", text)


def unexpected(what: str, error: Exception) -> StepFailed:
    """An error that nobody foresaw, as the client that met it is told of it; the log has all of it."""
    return StepFailed(f"{what}: {without_places(repr(error))}")
