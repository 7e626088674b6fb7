"""Every error that this package raises on purpose, and its Triton code.

    InflightError                     INTERNAL
    ├── RequestError                  an error of one request; no other request is affected
    │   ├── InvalidArgument           INVALID_ARG
    │   │   ├── TooLong               prompt and output exceed the model or its KV cache
    │   │   └── BadAdapter            the LoRA adapter that the request names cannot be used
    │   ├── Unsupported               UNSUPPORTED
    │   ├── AlreadyExists             ALREADY_EXISTS
    │   ├── NotFound                  NOT_FOUND
    │   ├── Unavailable               UNAVAILABLE
    │   │   └── QueueFull             the queue of waiting requests is full
    │   ├── Cancelled                 CANCELLED
    │   └── StepFailed                INTERNAL: an exception in the iteration with the request
    └── ConfigError                   INTERNAL: the model cannot be loaded

The code is the name of a `TritonError` constant, so that packages below `inflight.triton` can choose one
without importing Triton. In a message, names of inputs are `Name` objects, so that each protocol can replace
them by its own names. Between processes an error is sent as `kind` and `marked`, and `error_from_kind`
restores it; `error_to_plain` and `error_from_plain` do this for errors inside larger values. Errors of the
Executor API, which stay in one process, are in `executor/errors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, TypeVar

from inflight.file_names import readable

_E = TypeVar("_E", bound="InflightError")

_PLACES = re.compile(
    r"(?<![\w/.])/[\w.+@~-]+(?:/[^\s'\":,;)]*)+"  # a path with at least two parts
    r"|inflight-server-\w[\w-]*|\w*shm_region\w*"  # regions of this server and of Triton in /dev/shm
)


class Name(str):
    """The name of an input in a message: a tensor of `tensorrt_llm`, or a field of another protocol.

    It may be a path such as messages[0].content. It must not contain braces.
    """

    __slots__ = ()

    @property
    def root(self) -> str:
        """The first name of the path, such as messages of messages[0].content."""
        return self.partition(".")[0].partition("[")[0]


class InflightError(Exception):
    """Base class of this package's errors.

        InvalidArgument(Name("request_output_len"), f" must be at least 1, got {length}")

    Args:
        message: Parts of the message: text, and names of inputs as `Name`. The message should have the
            received and the expected value.

    Attributes:
        code: The name of the Triton error code.
        kind: The name with which errors of this class are sent between processes: the code, or another name
            if front ends must distinguish the class from others with the same code.
    """

    code = "INTERNAL"
    kind = "INTERNAL"

    def __init__(self, *message: str) -> None:
        super().__init__(*message)

    def __init_subclass__(cls) -> None:
        own = vars(cls)
        cls.kind = own.get("kind", own.get("code", cls.kind))

    def __str__(self) -> str:
        return readable("".join(self.args))

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of inputs in the message, in order."""
        return tuple(part for part in self.args if isinstance(part, Name))

    @property
    def marked(self) -> str:
        """The message as text with marked names: names are in braces, and every other brace is doubled.

        The syntax is that of str.format: "{end_id} must be in [0, 9], got 12".
        """
        parts = (
            f"{{{part}}}" if isinstance(part, Name) else part.replace("{", "{{").replace("}", "}}")
            for part in self.args
        )
        return readable("".join(parts))

    def with_names(self: _E, shown: Callable[[str], str]) -> _E:
        """Return the error with other names of inputs. The constructor of its class must take only a message.

        Args:
            shown: Function that returns the new name for a name.
        """
        return type(self)(*(Name(shown(part)) if isinstance(part, Name) else part for part in self.args))


class RequestError(InflightError):
    """An error that concerns one request; all other requests are unaffected."""


class InvalidArgument(RequestError):
    """A request that is invalid as it was sent."""

    code = "INVALID_ARG"


class TooLong(InvalidArgument):
    """A prompt, alone or with the tokens to generate, that exceeds the model or its KV cache."""

    kind = "TOO_LONG"


class BadAdapter(InvalidArgument):
    """A LoRA adapter that a request names and that cannot be used."""

    kind = "BAD_ADAPTER"


class Unsupported(RequestError):
    """A request for a declared feature that this server does not implement."""

    code = "UNSUPPORTED"


class AlreadyExists(RequestError):
    """A request whose id belongs to another request in flight."""

    code = "ALREADY_EXISTS"


class NotFound(RequestError):
    """A request that names something that does not exist."""

    code = "NOT_FOUND"


class Unavailable(RequestError):
    """A server that cannot accept the request now. A later attempt may succeed."""

    code = "UNAVAILABLE"


class QueueFull(Unavailable):
    """A queue that is full."""

    kind = "QUEUE_FULL"


class Unreachable(Unavailable):
    """An engine that cannot be reached. Its address is in the log but not in the message, which clients get."""


class NotStarted(Unreachable):
    """An engine that nobody has reached yet and whose socket does not exist: its model still loads."""


class Cancelled(RequestError):
    """A request that its client cancelled, or whose client disconnected."""

    code = "CANCELLED"


class StepFailed(RequestError):
    """A request whose iteration raised an exception."""


class ConfigError(InflightError):
    """A parameter, checkpoint or environment with which the model cannot be loaded."""


_TRAVELLING = (
    InvalidArgument,
    TooLong,
    BadAdapter,
    Unsupported,
    AlreadyExists,
    NotFound,
    Unavailable,
    QueueFull,
    Cancelled,
    StepFailed,
)
_BY_KIND: dict[str, type[RequestError]] = {cls.kind: cls for cls in _TRAVELLING}

ERROR_CODES: tuple[str, ...] = tuple(dict.fromkeys(cls.code for cls in _TRAVELLING))
"""Every code with which a request can fail."""

ERROR_KINDS: tuple[str, ...] = tuple(_BY_KIND)
"""Every kind of error that can be sent between processes."""


def joined(names: Sequence[str], between: str) -> list[str]:
    """Return the parts of a message that lists `names`, separated by `between`."""
    parts = [part for name in names for part in (between, Name(name))]
    return parts[1:]


def error_from_kind(kind: str, marked: str) -> RequestError:
    """Return the error of this kind whose message with marked names is `marked`.

    An unknown kind gives `StepFailed`. Raises ValueError if the marks are invalid.
    """
    parts: list[str] = []
    for text, name, spec, conversion in Formatter().parse(marked):
        parts += [text] if text else []
        if name is not None:
            if spec or conversion:
                raise ValueError(f"expected the name of an input in braces, got {name!r} with a format")
            parts.append(Name(name))
    return _BY_KIND.get(kind, StepFailed)(*parts)


def error_to_plain(value: object) -> tuple[str, str]:
    """Encode an error as (kind, marked message). This is an `enc_hook` of msgspec."""
    if isinstance(value, InflightError):
        return value.kind, value.marked
    # msgspec requires this exception for an unknown type, which is a defect of the program, not of the data.
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be encoded")


def error_from_plain(kind: type, value: Any) -> RequestError:
    """Decode an error that `error_to_plain` encoded. This is a `dec_hook` of msgspec."""
    if not issubclass(kind, InflightError):
        # As in `error_to_plain`. msgspec would convert a ValueError to its ValidationError, which is for
        # invalid data.
        raise NotImplementedError(f"a value of type {kind.__name__} cannot be decoded")
    match value:
        case [str(kind_name), str(marked)]:
            return error_from_kind(kind_name, marked)
        case _:
            raise ValueError(f"expected an error's kind and message, got {value!r}")


def without_places(text: str) -> str:
    """Return a text for clients: paths, sockets and shared-memory regions of this machine are replaced by "…".

    Used for messages of other libraries.
    """
    return _PLACES.sub("…", text)


def unexpected(what: str, error: Exception) -> StepFailed:
    """Return the error for the client of a request that raised an unexpected exception.

    The log has the details.
    """
    return StepFailed(f"{what}: {without_places(repr(error))}")
