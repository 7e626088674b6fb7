"""From a core Response to Triton's InferenceResponse: exactly the requested outputs, in the table's types.

Owns shapes and data types of outputs and the codes of errors. Does not know who waits for the response. Runs on
the sender thread; errors also on the thread that calls execute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from inflight.core.response import Result
from inflight.errors import InflightError
from inflight.triton.requests import FrontEndOptions
from inflight.triton.tensor_reader import NUMPY_TYPES
from inflight.triton.tensors import OUTPUTS


class ResponseBuilder:
    """Makes responses with the `triton_python_backend_utils` module it is given."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb_utils = pb_utils
        self._types = {spec.name: NUMPY_TYPES[spec.dtype] for spec in OUTPUTS.specs}

    def outputs(self, result: Result, options: FrontEndOptions, text: str | None) -> Any:
        """One response of one sequence.

        Args:
            result: Ids and counts.
            options: Says which outputs are wanted.
            text: For text_output; None if there is no text to return.
        """
        tensors = [self._tensor(name, value) for name, value in _values(result, options, text)]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def empty(self) -> Any:
        """A response without outputs: the answer to a stop request."""
        return self._pb_utils.InferenceResponse(output_tensors=[])

    def error(self, error: InflightError) -> Any:
        """A response that carries an error and its Triton code."""
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))

    def _tensor(self, name: str, value: Sequence[Any]) -> Any:
        return self._pb_utils.Tensor(name, np.array(value, dtype=self._types[name]))


def triton_error(pb_utils: Any, error: InflightError) -> Any:
    """The TritonError of an error of this package."""
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))


def _values(
    result: Result, options: FrontEndOptions, text: str | None
) -> Iterator[tuple[str, Sequence[Any]]]:
    """(name, nested lists) of the wanted outputs; the outer level is the batch of one, then one per beam."""
    wanted = options.requested_outputs
    if "output_ids" in wanted:
        yield "output_ids", [[result.output_token_ids]]
    if "sequence_length" in wanted:
        yield "sequence_length", [[len(result.output_token_ids)]]
    if "text_output" in wanted and text is not None:
        yield "text_output", [[text.encode("utf-8")]]
    if "finish_reason" in wanted:
        yield "finish_reason", [[result.finish_reason.name.encode()]]
    if "num_input_tokens" in wanted and options.return_num_input_tokens:
        yield "num_input_tokens", [[result.num_input_tokens]]
    if "num_output_tokens" in wanted and options.return_num_output_tokens:
        yield "num_output_tokens", [[result.num_output_tokens]]
