"""Sampling controls and outputs: the parts that every `Request` has."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from inflight.core.request.sampling_config import CONTROLS
from inflight.executor.control_fields import SamplingControls
from inflight.executor.errors import InvalidValue
from inflight.executor.typed import NOT_NEGATIVE, Typed, also_called, within

_ALIASES = {
    other: control.executor.name
    for control in CONTROLS.values()
    if control.executor
    for other in control.executor.aliases
}


@also_called(**_ALIASES)
@dataclass
class SamplingConfig(SamplingControls):
    """Sampling controls of a request; None: the default. All fields but the two below are in `SamplingControls`.

    Attributes:
        prompt_ignore_length: Number of first prompt tokens that penalties ignore (0).
        beam_width_array: Beam widths by step.
    """

    _: KW_ONLY
    prompt_ignore_length: int | None = within(None, NOT_NEGATIVE)
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        returned = self.num_return_sequences
        if returned is not None and 1 < self.beam_width < returned:
            raise InvalidValue(
                f"SamplingConfig.num_return_sequences must be at most beam_width ({self.beam_width}) where there "
                f"are beams, got {returned}"
            )


@dataclass
class AdditionalModelOutput(Typed):
    """A tensor of the model to return.

    Attributes:
        name: Name of the tensor.
        gather_context: Whether to return it for the prompt's positions too.
    """

    name: str
    gather_context: bool = False


@dataclass
class OutputConfig(Typed):
    """Outputs to return besides token ids.

    Attributes:
        return_log_probs: Log probs of generated tokens, and their sum.
        return_context_logits: Logits after each prompt token.
        return_generation_logits: Logits that each generated token was sampled from.
        exclude_input_from_output: Leave the prompt out of the output of a request that is not streamed.
        return_encoder_output: Hidden states of an encoder.
        return_perf_metrics: Times and counts.
        additional_model_outputs: Tensors of the model to return.
        return_receipt: The request's receipt. Not in TensorRT-LLM.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    return_receipt: bool = False
