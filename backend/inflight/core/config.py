"""How the batcher schedules: one frozen value, complete before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.core.batch import EngineLimits
from inflight.core.request import ModelLimits
from inflight.errors import ConfigError


class CapacitySchedulerPolicy(Enum):
    """TensorRT-LLM's `batch_scheduler_policy`. Specification: The Batch Manager, GptManager Design.

    GUARANTEED_NO_EVICT admits a request only when its KV blocks are certain to suffice to the end.
    MAX_UTILIZATION admits it when its context fits, and pauses the last-started one when blocks run out.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Scheduling parameters, by TensorRT-LLM's names where it has them.

    Attributes:
        policy: Who may hold KV blocks.
        max_num_tokens: Most rows of one packed forward pass, context and generation tokens together.
        enable_chunked_context: Split contexts over iterations; then a prompt may exceed max_num_tokens.
        enable_kv_cache_reuse: Share full blocks of equal prefixes between requests.
        max_num_requests: Most requests active at once, waiting ones included; negative for no bound.
        max_beam_width: Most beams of a search; None: as many as there are slots.
    """

    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    max_num_tokens: int = 8192
    enable_chunked_context: bool = False
    enable_kv_cache_reuse: bool = True
    max_num_requests: int = -1
    max_beam_width: int | None = None

    def validate(self, limits: EngineLimits) -> None:
        """Raise ConfigError when this configuration cannot work on an engine of such limits."""
        if self.max_num_tokens < limits.max_num_sequences:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must be at least max_batch_size "
                f"({limits.max_num_sequences}), so that every running request gets a token in an iteration"
            )
        if self.max_num_tokens < limits.tokens_per_block:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must hold at least one KV block of "
                f"{limits.tokens_per_block} tokens, because long contexts are computed in chunks of blocks"
            )
        if self.max_beam_width is not None and self.max_beam_width > limits.max_num_sequences:
            raise ConfigError(
                f"max_beam_width is {self.max_beam_width}; it can be at most max_batch_size "
                f"({limits.max_num_sequences}), because every beam runs as a sequence of the batch"
            )
        beside_others = limits.max_num_sequences - 1 + limits.tokens_per_block
        if self.enable_chunked_context and self.max_num_tokens < beside_others:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; with enable_chunked_context it must be at least "
                f"{beside_others}, so that a chunk of one KV block ({limits.tokens_per_block} tokens) fits beside "
                "a token for every other running request; else running streams would keep prompts waiting"
            )

    def model_limits(self, limits: EngineLimits) -> ModelLimits:
        """What one request may ask for under this configuration on an engine of such limits."""
        longest = limits.max_sequence_length - 1
        chunked, slots = self.enable_chunked_context, limits.max_num_sequences
        return ModelLimits(
            vocab_size=limits.vocab_size,
            max_sequence_length=limits.max_sequence_length,
            max_input_length=longest if chunked else min(longest, self.max_num_tokens),
            num_blocks=limits.num_blocks,
            tokens_per_block=limits.tokens_per_block,
            max_beam_width=min(self.max_beam_width or slots, slots),
            # Chunked, a draft and the last chunk fit beside a token for every other running request.
            max_draft_length=self.max_num_tokens - (slots - 1 + limits.tokens_per_block if chunked else 1),
            max_context_tokens=1 << 62 if chunked else self.max_num_tokens,
        )
