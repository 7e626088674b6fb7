"""From outputs to Triton's InferenceResponse: exactly the wanted tensors, in the types that config.pbtxt declares.

Owns the data types of outputs and the codes of errors. Does not know who waits for the response. Runs on the
sender thread; errors also on the thread that calls execute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inflight.errors import InflightError
from inflight.triton.output_arrays import make_array
from inflight.triton.reply import Output
from inflight.triton.tensor_reader import NUMPY_TYPES
from inflight.triton.tensors import OUTPUTS


class ResponseBuilder:
    """Makes responses with the `triton_python_backend_utils` module it is given."""

    def __init__(self, pb_utils: Any, declared: Mapping[str, str] | None = None) -> None:
        """`declared`: data types of outputs where they are not those of the table."""
        self._pb_utils = pb_utils
        dtypes = {spec.name: (declared or {}).get(spec.name, spec.dtype) for spec in OUTPUTS.specs}
        self._types = {name: NUMPY_TYPES[dtype] for name, dtype in dtypes.items()}
        # Clients want the same few sets again and again, in every response.
        self._in_order = lru_cache(maxsize=64)(self._typed)

    def outputs(self, outputs: Sequence[Output]) -> Any:
        """One response, with every tensor that one of its prompts wants."""
        wanted = outputs[0].prompt.options.outputs
        if len(outputs) > 1:
            wanted = wanted.union(*(output.prompt.options.outputs for output in outputs[1:]))
        tensors = []
        for name, dtype in self._in_order(wanted):
            array = make_array(name, outputs)
            if array is not None:
                tensors.append(self._pb_utils.Tensor(name, np.ascontiguousarray(array, dtype)))
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _typed(self, wanted: frozenset[str]) -> tuple[tuple[str, type], ...]:
        """(name, data type) of these outputs, in the table's order."""
        return tuple((name, dtype) for name, dtype in self._types.items() if name in wanted)

    def empty(self) -> Any:
        """A response without outputs: the answer to a stop request."""
        return self._pb_utils.InferenceResponse(output_tensors=[])

    def state(self, text: str) -> Any:
        """The answer to a state request."""
        array = np.array([[text.encode("utf-8")]], np.object_)
        return self._pb_utils.InferenceResponse(output_tensors=[self._pb_utils.Tensor("state", array)])

    def error(self, error: InflightError) -> Any:
        """A response that carries an error and its Triton code."""
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))


def triton_error(pb_utils: Any, error: InflightError) -> Any:
    """The TritonError of an error of this package."""
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
