"""The exception for every failure of a server or of the connection to it."""

from __future__ import annotations

from string import Formatter

from inflight_client.keywords import shown_name

_STATUS = {
    "INVALID_ARG": "INVALID_ARGUMENT",
    "TOO_LONG": "INVALID_ARGUMENT",
    "BAD_ADAPTER": "INVALID_ARGUMENT",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "QUEUE_FULL": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
}
"""gRPC's status name by the server's kind of error."""


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
    import grpc
    from tritonclient.utils import InferenceServerException

    status, message = "UNKNOWN", str(error)
    if isinstance(error, InferenceServerException):
        status = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
        message = error.message()
        kind, _, marked = message.partition(": ")
        if kind in _STATUS:
            status, message = _STATUS[kind], _with_options(marked)
    elif isinstance(error, grpc.RpcError):
        status, message = error.code().name, error.details() or ""
    if "://" in url or not url:
        message = (
            f"the address is {url!r}, expected HOST:PORT of Triton's gRPC, as localhost:8001 ({message})"
        )
    elif status == "UNAVAILABLE" and "connect" in message.lower():
        # An HTTP server may listen there: gRPC reports that only in some attempts.
        expected = "url is the address of Triton's gRPC port, not of /v1"
        starts = "scripts/serve (or inflight serve) starts a server, with gRPC at port 8001"
        message = f"no gRPC server answers at {url}; {expected}; {starts} ({message})"
    return ServerError(status, message)


def _with_options(marked: str) -> str:
    """Replace the names of tensors, which are marked by braces as for str.format, by names of options."""
    try:
        parts = [(text, name) for text, name, *_ in Formatter().parse(marked)]
    except ValueError:  # another server's message, whose braces mark no names
        return marked
    return "".join(text + ("" if name is None else shown_name(name)) for text, name in parts)
