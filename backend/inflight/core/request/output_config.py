"""What a request wants back: one frozen value per request."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidArgument

MAX_TOP_LOG_PROBS = 1024


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """TensorRT-LLM's `OutputConfig`, and this project's own.

    All log probabilities are log_softmax of the model's logits as they come, in float32: before bias, penalties
    and temperature. `generation_logits` are the same logits, so that one follows from the other.

    Attributes:
        exclude_input_from_output: Leave the prompt out of the output ids of a non-streaming request. Streamed
            responses never carry the prompt. Tensor `exclude_input_in_output`.
        return_log_probs: Log probability of each generated token, and their sum. Tensor `return_log_probs`.
        num_top_log_probs: Beside each generated token the so many likeliest ones with their log probabilities.
            Tensor `num_top_log_probs`.
        return_prompt_log_probs: Log probability of each prompt token. Tensor `return_prompt_log_probs`.
        return_context_logits: Logits after each prompt token. Tensor `return_context_logits`.
        return_generation_logits: Logits that each generated token was chosen from. Tensor
            `return_generation_logits`.
        return_perf_metrics: Times, KV blocks and draft counts. Tensor `return_perf_metrics`.
    """

    exclude_input_from_output: bool = False
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    return_prompt_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False

    @property
    def wants_details(self) -> bool:
        """Whether generated tokens come with more than their ids."""
        return self.return_log_probs or self.num_top_log_probs > 0 or self.return_generation_logits

    @property
    def wants_context(self) -> bool:
        """Whether anything of every prompt position comes back; then no part of the prompt is reused."""
        return self.return_context_logits or self.return_prompt_log_probs

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgument naming the tensor, what came and what was expected."""
        most = min(MAX_TOP_LOG_PROBS, vocab_size)
        if not 0 <= self.num_top_log_probs <= most:
            raise InvalidArgument(f"num_top_log_probs must be in [0, {most}], got {self.num_top_log_probs}")
