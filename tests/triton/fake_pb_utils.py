"""A stand-in for Triton's `triton_python_backend_utils` module, for tests of models without a server.

Owns the parts of that module that the tests need: tensors, requests, responses, response senders that record
the responses, errors with codes, custom metrics, and a logger that records its lines. It is stricter than the
real one: using a response sender after the final flag is undefined there, and fails here. Any thread.

A `FakePbUtils` object replaces the module; put it into `sys.modules` for code that imports the module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from inflight.testing.pb_utils import COMPLETE_FINAL, InferenceResponse, Tensor, TritonError
from tests.triton.fake_metrics import FakeMetrics

_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of `ResponseSender.send`."""

    response: InferenceResponse | None
    is_final: bool


class ResponseSender:
    """Records the sent responses. Tests set `cancelled`, and `failures` for errors of the next sends."""

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
        """Wait for the final flag, and return everything that was sent."""
        if not self._finished.wait(_WAIT_S):
            raise AssertionError(f"no final response within {_WAIT_S:g} s; sent so far: {self.sent}")
        return self.sent


class InferenceRequest:
    """One request as `execute` receives it.

    Args:
        inputs: Arrays by name, in the shapes that a model sees.
        requested_output_names: Names of wanted outputs; the real server lists all outputs if the client named
            none.
        request_id: The client's id.
        sender: Sender of its responses.
        parameters: The client's request parameters, as JSON.
        timeout: The client's timeout in microseconds; 0 without one.
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
        """Return the input tensors."""
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """Return the names of the wanted outputs."""
        return self._requested_output_names

    def request_id(self) -> str:
        """Return the client's id, or "" without one."""
        return self._request_id

    def parameters(self) -> str:
        """Return a JSON object; HTTP generate puts every key into it that is not an input."""
        return self._parameters

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 without one; a negative one is taken modulo 2**64."""
        return self._timeout

    def get_response_sender(self) -> ResponseSender:
        """Return the sender of later responses."""
        return self.sender


@dataclass(slots=True)
class Logger:
    """Records (level, line)."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def log_error(self, message: str) -> None:
        """Record an error."""
        self.lines.append(("error", message))

    def log_warn(self, message: str) -> None:
        """Record a warning."""
        self.lines.append(("warn", message))

    def log_info(self, message: str) -> None:
        """Record a line at the level info."""
        self.lines.append(("info", message))

    def log_verbose(self, message: str) -> None:
        """Record a line at the level verbose."""
        self.lines.append(("verbose", message))


class FakePbUtils:
    """Stands in for the module; each object has a logger of its own."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
    Tensor = Tensor
    TritonError = TritonError
    InferenceRequest = InferenceRequest
    InferenceResponse = InferenceResponse

    def __init__(self, metrics: FakeMetrics | None = None) -> None:
        """`metrics` decides which kinds this server has; `self.metrics` is its page."""
        self.Logger = Logger()
        self.metrics = metrics or FakeMetrics()
        self.MetricFamily = self.metrics.family_class
