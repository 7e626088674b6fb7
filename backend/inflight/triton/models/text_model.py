"""What `preprocessing` and `postprocessing` share: a tokenizer, and an answer to every request on the spot.

Owns the shape of their execute, and the guard that ends the server if this process is killed. Triton calls it on
one thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inflight.config import Role
from inflight.errors import InflightError, StepFailed
from inflight.server.guard import guard_in_server
from inflight.serving.completion_text import TokenizerFinder
from inflight.triton.log import log_to_triton
from inflight.triton.model_args import read_model_args
from inflight.triton.request_parameters import TIMEOUT, refuse_unread
from inflight.triton.responses import triton_error
from inflight.triton.tensor_reader import NUMPY_TYPES, TensorReader
from inflight.triton.tensor_spec import TensorTable, Vocabulary


class TextModel:
    """Base: one response per request; one bad request of a call fails alone."""

    role: Role
    inputs: TensorTable
    outputs: TensorTable

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises ConfigError with everything that is wrong with config.pbtxt."""
        import triton_python_backend_utils as pb_utils

        log_to_triton(pb_utils)
        self._pb_utils = pb_utils
        self.parameters = read_model_args(args, self.role).parameters
        self.tokenizers = TokenizerFinder(self.parameters.tokenizer_dir)
        self.tokenizers.find()
        # Last, as Triton calls no finalize where this fails.
        self._guard = guard_in_server(args["model_name"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Say goodbye to the guard; there is nothing in flight."""
        if self._guard is not None:
            self._guard.dismiss()

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[np.ndarray]]:
        """Outputs by name, for each row of the batch one array, all of one shape; raises RequestError."""
        raise NotImplementedError

    def _answer(self, request: Any) -> Any:
        try:
            given = json.loads(request.parameters() or "{}")
            refuse_unread(
                given, self.inputs, Vocabulary.TOKENS, (TIMEOUT, *self.parameters.ignored_request_parameters)
            )
            reader = TensorReader(request.inputs(), self.inputs, Vocabulary.TOKENS)
            reader.refuse_unbuilt()
            outputs = self.convert(reader.rows())
        except InflightError as error:
            return self._error(error)
        except Exception as error:
            return self._error(StepFailed(f"{self.role.value} failed: {error!r}"))
        wanted = set(request.requested_output_names())
        tensors = [self._tensor(name, arrays) for name, arrays in outputs.items() if name in wanted]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _tensor(self, name: str, arrays: Sequence[np.ndarray]) -> Any:
        spec = self.outputs[name]
        array = np.stack(arrays) if spec.is_batched else np.concatenate(arrays)
        return self._pb_utils.Tensor(name, array.astype(NUMPY_TYPES[spec.dtype]))

    def _error(self, error: InflightError) -> Any:
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))
