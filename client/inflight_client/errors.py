"""The exception for every failure of a server or of the connection to it."""

from __future__ import annotations

import re

import grpc
from tritonclient.utils import InferenceServerException

_STATUS = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}
"""gRPC's names of Triton's codes that differ."""
_CODED = re.compile(
    r"(INVALID_ARG|UNSUPPORTED|ALREADY_EXISTS|NOT_FOUND|UNAVAILABLE|CANCELLED|INTERNAL): (.*)", re.DOTALL
)


class ServerError(Exception):
    """The server refused or lost a request, or cannot be reached.

    Attributes:
        status: gRPC's name of Triton's error code: INVALID_ARGUMENT, UNIMPLEMENTED (Triton's UNSUPPORTED),
            ALREADY_EXISTS, NOT_FOUND, UNAVAILABLE, CANCELLED, INTERNAL or UNKNOWN.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def server_error(error: Exception, url: str) -> ServerError:
    """Convert an error raised or reported by tritonclient or gRPC to a ServerError."""
    status, message = "UNKNOWN", str(error)
    if isinstance(error, InferenceServerException):
        status = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
        message = error.message()
        if coded := _CODED.fullmatch(message):
            status, message = _STATUS.get(coded[1], coded[1]), coded[2]
    elif isinstance(error, grpc.RpcError):
        status, message = error.code().name, error.details() or ""
    if status == "UNAVAILABLE" and "connect" in message.lower():
        message = f"no server answers at {url}; scripts/serve starts one ({message})"
    return ServerError(status, message)
