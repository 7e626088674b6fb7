"""Every error this package raises on purpose, and the Triton code each one travels with.

    InflightError                     INTERNAL
    ├── RequestError                  one request is at fault; nothing else is touched
    │   ├── InvalidArgument           INVALID_ARG
    │   │   ├── TooLong               prompt and output exceed the model or its KV cache
    │   │   └── BadAdapter            the LoRA adapter that the request names cannot be used
    │   ├── Unsupported               UNSUPPORTED
    │   ├── AlreadyExists             ALREADY_EXISTS
    │   ├── NotFound                  NOT_FOUND
    │   ├── Unavailable               UNAVAILABLE
    │   │   └── QueueFull             as many requests wait as may
    │   ├── Cancelled                 CANCELLED
    │   └── StepFailed                INTERNAL: the iteration that carried the request raised
    └── ConfigError                   INTERNAL: the model does not load

The code is the name of a `TritonError` constant, so that no layer below `inflight.triton` needs Triton to
choose one. A message keeps the names of inputs apart from its text (`Name`), so that each protocol can show its
own names. Between processes an error travels as `kind` and `marked`, and `error_from_kind` rebuilds it;
`error_to_plain` and `error_from_plain` are for whole values that have errors in them. Errors of the Executor API,
which stay in one process, are in `executor/errors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, TypeVar

from inflight.file_names import readable

_E = TypeVar("_E", bound="InflightError")

_PLACES = re.compile(
    r"(?<![\w/.])/[\w.+@~-]+(?:/[^\s'\":,;)]*)+"  # a path of two parts and more
    r"|inflight-server-\w[\w-]*|\w*shm_region\w*"  # names in /dev/shm, this server's and Triton's own
)


class Name(str):
    """The name of an input in a message: a tensor of `tensorrt_llm`, or a field that only another protocol has.

    It may be a path into it: messages[0].content. It has no braces.
    """

    __slots__ = ()

    @property
    def root(self) -> str:
        """The input that a path leads into."""
        return self.partition(".")[0].partition("[")[0]


class InflightError(Exception):
    """Base of the tree.

        InvalidArgument(Name("request_output_len"), f" must be at least 1, got {length}")

    Args:
        message: What came and what was expected, in parts: text, and names of inputs as `Name`.

    Attributes:
        code: The name of the Triton error code.
        kind: The name by which an error of this class travels between processes: its code, unless a rim tells
            it from others of that code.
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
        """The message as text that keeps its names: a name stands in braces, and every other brace is doubled.

        That is the syntax of str.format: "{end_id} must be in [0, 9], got 12".
        """
        parts = (
            f"{{{part}}}" if isinstance(part, Name) else part.replace("{", "{{").replace("}", "}}")
            for part in self.args
        )
        return readable("".join(parts))

    def with_names(self: _E, shown: Callable[[str], str]) -> _E:
        """Return the same error with other names of inputs in it; the class must take a message alone.

        Args:
            shown: The new name for each.
        """
        return type(self)(*(Name(shown(part)) if isinstance(part, Name) else part for part in self.args))


class RequestError(InflightError):
    """One request failed; every other request goes on untouched."""


class InvalidArgument(RequestError):
    """The request can never work as it was sent."""

    code = "INVALID_ARG"


class TooLong(InvalidArgument):
    """The prompt, alone or with what is to be generated, has more tokens than the model or its KV cache takes."""

    kind = "TOO_LONG"


class BadAdapter(InvalidArgument):
    """The LoRA adapter that the request names cannot be used."""

    kind = "BAD_ADAPTER"


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


class QueueFull(Unavailable):
    """As many requests wait as the queue takes."""

    kind = "QUEUE_FULL"


class Unreachable(Unavailable):
    """The engine is away. The log says where it was looked for, and this message does not: clients read it."""


class Cancelled(RequestError):
    """The client cancelled the request or went away."""

    code = "CANCELLED"


class StepFailed(RequestError):
    """The iteration that carried the request raised an exception."""


class ConfigError(InflightError):
    """A parameter, checkpoint or environment the model cannot load with."""


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
"""Every code a request can fail with."""

ERROR_KINDS: tuple[str, ...] = tuple(_BY_KIND)
"""Every kind of error that can travel."""


def joined(names: Sequence[str], between: str) -> list[str]:
    """Return the parts of a message that are `names` with `between` between each two."""
    parts = [part for name in names for part in (between, Name(name))]
    return parts[1:]


def error_from_kind(kind: str, marked: str) -> RequestError:
    """Return the error of this kind whose message, its names marked, is `marked`.

    An unknown kind becomes `StepFailed`. Raises ValueError if the marks are broken.
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
    """An error as its kind and marked message: what encoders call for types that they do not know (`enc_hook`)."""
    if isinstance(value, InflightError):
        return value.kind, value.marked
    # msgspec expects this error of a hook that does not know a type: that is a defect of the program, not of data.
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be encoded")


def error_from_plain(kind: type, value: Any) -> RequestError:
    """Return the error that `error_to_plain` made plain: what decoders call for such fields (`dec_hook`)."""
    if not issubclass(kind, InflightError):
        # As above. A ValueError would become msgspec's ValidationError, which is about data.
        raise NotImplementedError(f"a value of type {kind.__name__} cannot be decoded")
    match value:
        case [str(kind_name), str(marked)]:
            return error_from_kind(kind_name, marked)
        case _:
            raise ValueError(f"expected an error's kind and message, got {value!r}")


def without_places(text: str) -> str:
    """A text for clients, without what it names of this machine: paths, sockets and regions of shared memory.

    For texts of other libraries, which have no parts that could be left out.
    """
    return _PLACES.sub("…", text)


def unexpected(what: str, error: Exception) -> StepFailed:
    """Return an error that nobody foresaw, as the client that met it is told of it; the log has all of it."""
    return StepFailed(f"{what}: {without_places(repr(error))}")
