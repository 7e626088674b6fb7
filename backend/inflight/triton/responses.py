"""Make Triton's InferenceResponses from outputs, and send them to one request's client.

Selects the output tensors, exactly the requested ones, and converts them to the data types that config.pbtxt
declares. Also ensures that Triton's response sender is not used after the final flag. Responses are made on
the sender thread, error responses on any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inflight.errors import InflightError
from inflight.prompt import Output
from inflight.tensors.output_arrays import make_array, without_elements
from inflight.tensors.output_table import OUTPUTS, is_additional
from inflight.tensors.reader import NUMPY_TYPES


class ResponseBuilder:
    """Makes responses with a `triton_python_backend_utils` module.

    Args:
        pb_utils: The module, or a fake of it.
        declared: Data types by name of the outputs whose config.pbtxt differs from the table of outputs.
        is_batched: Whether outputs have a batch dimension.
    """

    def __init__(
        self, pb_utils: Any, declared: Mapping[str, str] | None = None, is_batched: bool = True
    ) -> None:
        self._pb_utils = pb_utils
        self._is_batched = is_batched
        declared = declared or {}
        dtypes = {spec.name: declared.get(spec.name, spec.dtype) for spec in OUTPUTS.specs}
        dtypes |= {name: dtype for name, dtype in declared.items() if is_additional(name)}
        self._types = {name: NUMPY_TYPES[dtype] for name, dtype in dtypes.items()}
        # Clients request the same few sets of outputs in every response.
        self._in_order = lru_cache(maxsize=64)(self._typed)

    def make_response(self, outputs: Sequence[Output]) -> Any:
        """Build one InferenceResponse. Outputs that the client named but did not enable are empty tensors."""
        options = outputs[0].prompt.options
        wanted, named = options.outputs, options.named
        if len(outputs) > 1:
            wanted = wanted.union(*(output.prompt.options.outputs for output in outputs[1:]))
        tensors: list[Any] = []
        for name, dtype in self._in_order(wanted | named if named else wanted):
            array = make_array(name, outputs) if name in wanted else without_elements(name, len(outputs))
            if array is not None:
                if not self._is_batched and (is_additional(name) or OUTPUTS[name].is_batched):
                    array = array[0]  # without a batch dimension there is one prompt
                tensors.append(self._pb_utils.Tensor(name, np.ascontiguousarray(array, dtype)))
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def tensor_sizes(self, response: Any) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of each tensor of a response."""
        for tensor in response.output_tensors():
            yield tensor.name(), tensor.as_numpy().nbytes

    def _typed(self, wanted: frozenset[str]) -> tuple[tuple[str, type[np.generic]], ...]:
        """Return (name, data type) of the outputs in `wanted`, in the order of the table of outputs."""
        return tuple((name, dtype) for name, dtype in self._types.items() if name in wanted)

    def empty(self) -> Any:
        """Make a response without outputs, which answers a stop request."""
        return self._pb_utils.InferenceResponse(output_tensors=[])

    def text(self, name: str, text: str) -> Any:
        """Make a response with one text output, which answers a state request or an adapter command."""
        array = np.array([[text.encode("utf-8")]] if self._is_batched else [text.encode("utf-8")], np.object_)
        return self._pb_utils.InferenceResponse(output_tensors=[self._pb_utils.Tensor(name, array)])

    def error(self, error: InflightError, write: Callable[[InflightError], str] = str) -> Any:
        """Make an error response with the error's Triton code. `write` returns the error's message."""
        made = triton_error(self._pb_utils, error, write)
        return self._pb_utils.InferenceResponse(output_tensors=[], error=made)


def triton_error(pb_utils: Any, error: InflightError, write: Callable[[InflightError], str] = str) -> Any:
    """Convert one of this package's errors to a TritonError. `write` returns the error's message."""
    return pb_utils.TritonError(write(error), getattr(pb_utils.TritonError, error.code))


class TritonStream:
    """Triton's response sender for one request. It sends the final flag exactly once. Any thread.

    `is_cancelled` reads data that Triton frees when it receives the final flag, so a lock keeps
    `is_cancelled` and `finish` apart. Two threads must not be in `send` or `finish` at the same time.

    Args:
        sender: `InferenceRequest.get_response_sender()`.
        final_flag: The constant `TRITONSERVER_RESPONSE_COMPLETE_FINAL`.
        error_response: Function that makes the response for an error.
    """

    def __init__(self, sender: Any, final_flag: int, error_response: Callable[[InflightError], Any]) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._error_response = error_response
        self._lock = threading.Lock()
        self._finished = False

    def send(self, response: Any) -> None:
        """Send one response that is not the last."""
        self._sender.send(response)

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, with the final flag. Only the first call does anything."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            try:
                self._send_final(response)
            except Exception:  # Triton may raise anything, and the client must not wait forever
                with contextlib.suppress(Exception):  # report the first error
                    self._send_final(None)
                raise

    def fail(self, error: InflightError) -> None:
        """Send an error as the last response, like `finish`."""
        self.finish(self._error_response(error))

    def is_cancelled(self) -> bool:
        """Return whether the client cancelled or disconnected; false once the request is finished."""
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def _send_final(self, response: Any) -> None:
        if response is None:
            self._sender.send(flags=self._final_flag)
        else:
            self._sender.send(response, flags=self._final_flag)
