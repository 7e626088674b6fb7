"""What a request wants back: one frozen value per request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """TensorRT-LLM's `OutputConfig`, as far as it is built.

    Attributes:
        exclude_input_from_output: Leave the prompt out of the output ids of a non-streaming request. Streamed
            responses never carry the prompt. Tensor `exclude_input_in_output`.
    """

    exclude_input_from_output: bool = False
