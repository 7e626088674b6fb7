"""A request answered by two models: a draft model proposes tokens, the target model verifies them. Pure.

The engine does not know this type: `endpoint/drafting.py` turns it into ordinary requests for both models.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument, Name


@dataclass(frozen=True, slots=True)
class DraftedRequest(Request):
    """A `Request` answered by a draft model and a target model; it always streams.

    Attributes:
        num_draft_tokens: Maximum number of tokens that the draft model proposes per round. Tensor
            `num_draft_tokens`.
        use_draft_logits: Whether to accept drafts by rejection sampling, which keeps the target model's
            distribution. Otherwise a draft is accepted if it equals the target model's own token. Tensor
            `use_draft_logits`.
    """

    num_draft_tokens: int = 1
    use_draft_logits: bool = False

    @property
    def draft_length(self) -> int:
        """Maximum number of draft tokens verified at a time."""
        return self.num_draft_tokens

    def validate(self, limits: ModelLimits) -> None:
        """Raise InvalidArgument as `Request.validate` does, and for features that drafting does not support."""
        Request.validate(self, limits)
        if not 0 < self.num_draft_tokens <= limits.max_draft_length:
            raise InvalidArgument(
                Name("num_draft_tokens"),
                f" must be in [0, {limits.max_draft_length}] (0: none), got {self.num_draft_tokens}",
            )
        for tensor, is_used in self._unsupported().items():
            if is_used:
                raise InvalidArgument(
                    Name("num_draft_tokens"),
                    f" is {self.num_draft_tokens}: leave ",
                    Name(tensor),
                    " out then",
                )

    def _unsupported(self) -> dict[str, bool]:
        """Return for each tensor whether the request uses its feature; drafting does not support these
        features, as each round is a new request."""
        return {
            "beam_width": self.sampling.uses_beams,
            "num_return_sequences": self.sampling.num_sequences > 1,
            "runtime_top_p_decay": self.sampling.uses("top_p_decay"),
            "words of several tokens in stop_words_list": any(len(word) > 1 for word in self.stop_words),
            "draft_input_ids": self.draft is not None,
            "prompt_lookup_num_tokens": self.prompt_lookup_num_tokens > 0,
            "guided_decoding_guide_type": self.guide is not None,
            "logits_post_processor_name": bool(self.logits_post_processor_name),
            "lora_task_id and lora_name": self.lora is not None,
            "prompt_embedding_table": self.prompt_table is not None,
            "mrope_rotary_cos_sin": self.rotary_table is not None,
            "return_context_logits": self.output.return_context_logits,
            "return_prompt_log_probs": self.output.return_prompt_log_probs,
            "context outputs": self.output.wants_context,
        }

    def plain(self, **changes: Any) -> Request:
        """Return an ordinary `Request` with the same fields, except `changes`."""
        return Request(**({each.name: getattr(self, each.name) for each in fields(Request)} | changes))
