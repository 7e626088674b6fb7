"""A stand-in for Triton's `triton_python_backend_utils` module, for tests of models without a server.

Owns what the tests need of that module: tensors, requests, responses, response senders that remember what was
sent, errors with codes, custom metrics and a logger that remembers its lines. It is stricter than the real one
where the real one misbehaves: touching a response sender after the final flag fails here and is undefined there.
Any thread.

A `FakePbUtils` object takes the module's place; put it into `sys.modules` for code that imports the module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.triton.fake_metrics import FakeMetrics

COMPLETE_FINAL = 1
_WAIT_S = 30.0


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor {name!r} needs a numpy array, got {type(array).__name__}")
        self._name = name
        self._array = array

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def as_numpy(self) -> np.ndarray:
        """The array it was made of."""
        return self._array


class TritonError(Exception):
    """An error with one of Triton's codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._message = message
        self._code = code

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> int:
        """One of the class's constants."""
        return self._code


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self._output_tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """The outputs."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether the response has an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error."""
        return self._error

    def arrays(self) -> dict[str, np.ndarray]:
        """Outputs by name; the real class has no such method."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._output_tensors}


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of `ResponseSender.send`."""

    response: InferenceResponse | None
    is_final: bool


class ResponseSender:
    """Remembers what was sent. Tests set `cancelled`, and `failures` for errors of the next sends."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.cancelled = False
        self.failures: list[Exception] = []
        self.times_asked = 0
        self._finished = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Record one send, or raise the next of `failures`."""
        if self._finished.is_set():
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if response is None and not flags & COMPLETE_FINAL:
            raise RuntimeError("Inference Response object must be provided when the response flags is 0.")
        if self.failures:
            raise self.failures.pop(0)
        self.sent.append(Sent(response, bool(flags & COMPLETE_FINAL)))
        if flags & COMPLETE_FINAL:
            self._finished.set()

    def is_cancelled(self) -> bool:
        """Return the value that the test has set."""
        if self._finished.is_set():
            raise AssertionError("is_cancelled() after the final flag: the server has freed what it looks at")
        self.times_asked += 1
        return self.cancelled

    def wait_final(self) -> list[Sent]:
        """Everything that was sent, once the final flag is among it."""
        if not self._finished.wait(_WAIT_S):
            raise AssertionError(f"no final response within {_WAIT_S:g} s; sent so far: {self.sent}")
        return self.sent


class InferenceRequest:
    """One request as `execute` gets it.

    Args:
        inputs: Arrays by name, in the shapes that a model sees.
        requested_output_names: The real server puts all outputs here if the client named none.
        request_id: The client's.
        sender: Where responses go.
        parameters: What the client sent beside tensors, as JSON.
        timeout: The client's, in microseconds; 0 without one.
    """

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        requested_output_names: Iterable[str] = (),
        request_id: str = "",
        sender: ResponseSender | None = None,
        parameters: str = "{}",
        timeout: int = 0,
    ) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._requested_output_names = list(requested_output_names)
        self._request_id = request_id
        self.sender = sender or ResponseSender()
        self._parameters = parameters
        self._timeout = timeout

    def inputs(self) -> list[Tensor]:
        """The input tensors."""
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """Names of the outputs wanted."""
        return self._requested_output_names

    def request_id(self) -> str:
        """The client's id, "" without one."""
        return self._request_id

    def parameters(self) -> str:
        """A JSON object; HTTP generate puts every key there that is no input."""
        return self._parameters

    def timeout(self) -> int:
        """Microseconds, 0 without one; a negative one is what it is modulo 2**64."""
        return self._timeout

    def get_response_sender(self) -> ResponseSender:
        """The way to answer later."""
        return self.sender


@dataclass(slots=True)
class Logger:
    """Remembers (level, line)."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def log_error(self, message: str) -> None:
        """Level error."""
        self.lines.append(("error", message))

    def log_warn(self, message: str) -> None:
        """Level warn."""
        self.lines.append(("warn", message))

    def log_info(self, message: str) -> None:
        """Level info."""
        self.lines.append(("info", message))

    def log_verbose(self, message: str) -> None:
        """Level verbose."""
        self.lines.append(("verbose", message))


class FakePbUtils:
    """Looks like the module; every object has a logger of its own."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
    Tensor = Tensor
    TritonError = TritonError
    InferenceRequest = InferenceRequest
    InferenceResponse = InferenceResponse

    def __init__(self, metrics: FakeMetrics | None = None) -> None:
        """`metrics` says which kinds this server has; `self.metrics` is its page."""
        self.Logger = Logger()
        self.metrics = metrics or FakeMetrics()
        self.MetricFamily = self.metrics.family_class
