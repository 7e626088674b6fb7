"""The way out: outputs to Triton's InferenceResponse, and one client's end of one request.

Owns the data types of output tensors: exactly those that were asked for, in the types that config.pbtxt declares.
Owns also the moment after which Triton's response sender must not be touched. Does not know who waits for which
response. Responses are made on the sender thread, those with errors on any.
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
    """Makes responses with the `triton_python_backend_utils` module it is given.

    Args:
        pb_utils: The module, or a fake of it.
        declared: Data types of outputs where they are not those of the table.
        is_batched: Whether outputs have a dimension for the batch.
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
        # Clients want the same few sets again and again, in every response.
        self._in_order = lru_cache(maxsize=64)(self._typed)

    def outputs(self, outputs: Sequence[Output]) -> Any:
        """One response: the tensors that its prompts want; what else was named comes without elements."""
        options = outputs[0].prompt.options
        wanted, named = options.outputs, options.named
        if len(outputs) > 1:
            wanted = wanted.union(*(output.prompt.options.outputs for output in outputs[1:]))
        tensors = []
        for name, dtype in self._in_order(wanted | named if named else wanted):
            array = make_array(name, outputs) if name in wanted else without_elements(name, len(outputs))
            if array is not None:
                if not self._is_batched and (is_additional(name) or OUTPUTS[name].is_batched):
                    array = array[0]  # there is one prompt
                tensors.append(self._pb_utils.Tensor(name, np.ascontiguousarray(array, dtype)))
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def tensor_sizes(self, response: Any) -> Iterator[tuple[str, int]]:
        """Tell (name, bytes) of each tensor of a response."""
        for tensor in response.output_tensors():
            yield tensor.name(), tensor.as_numpy().nbytes

    def _typed(self, wanted: frozenset[str]) -> tuple[tuple[str, type], ...]:
        """(name, data type) of these outputs, in the table's order."""
        return tuple((name, dtype) for name, dtype in self._types.items() if name in wanted)

    def empty(self) -> Any:
        """A response without outputs: the answer to a stop request."""
        return self._pb_utils.InferenceResponse(output_tensors=[])

    def text(self, name: str, text: str) -> Any:
        """A response of one output, `name`: the answer to a state request, or to one about adapters."""
        array = np.array([[text.encode("utf-8")]] if self._is_batched else [text.encode("utf-8")], np.object_)
        return self._pb_utils.InferenceResponse(output_tensors=[self._pb_utils.Tensor(name, array)])

    def error(self, error: InflightError, write: Callable[[InflightError], str] = str) -> Any:
        """A response that carries an error and its Triton code; `write` makes its message."""
        made = triton_error(self._pb_utils, error, write)
        return self._pb_utils.InferenceResponse(output_tensors=[], error=made)


def triton_error(pb_utils: Any, error: InflightError, write: Callable[[InflightError], str] = str) -> Any:
    """The TritonError of an error of this package."""
    return pb_utils.TritonError(write(error), getattr(pb_utils.TritonError, error.code))


class TritonStream:
    """Triton's response sender of one request, which gets the final flag exactly once. Any thread.

    Triton frees what `is_cancelled` looks at when it gets the final flag, so asking and finishing exclude each
    other. `send` and `finish` belong to one thread at a time.

    Args:
        sender: `InferenceRequest.get_response_sender()`.
        final_flag: `TRITONSERVER_RESPONSE_COMPLETE_FINAL` of the module.
        error_response: Makes the response that tells this client of an error.
    """

    def __init__(self, sender: Any, final_flag: int, error_response: Callable[[InflightError], Any]) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._error_response = error_response
        self._lock = threading.Lock()
        self._finished = False

    def send(self, response: Any) -> None:
        """Send one response of several."""
        self._sender.send(response)

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, with the final flag. Only the first call does anything."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            try:
                self._send_final(response)
            except Exception:  # Triton may raise anything, and the client must not wait for ever all the same
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    self._send_final(None)
                raise

    def fail(self, error: InflightError) -> None:
        """Send an error as the last response, as `finish` does."""
        self.finish(self._error_response(error))

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or went away; false once the request is finished."""
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def _send_final(self, response: Any) -> None:
        if response is None:
            self._sender.send(flags=self._final_flag)
        else:
            self._sender.send(response, flags=self._final_flag)
