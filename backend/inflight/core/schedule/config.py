"""How the batcher schedules: one frozen value, complete before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.core.request.request import ModelLimits
from inflight.core.schedule.batch import EngineLimits
from inflight.errors import ConfigError


class CapacitySchedulerPolicy(Enum):
    """TensorRT-LLM's `batch_scheduler_policy`. Specification: The Batch Manager, GptManager Design.

    GUARANTEED_NO_EVICT admits a request only when its KV blocks are certain to suffice to the end.
    MAX_UTILIZATION admits it when its context fits; when blocks run out it pauses the last started
    of those of the lowest priority.
    STATIC_BATCH is V1 batching: requests are admitted only when none runs, and all of that batch end before the
    next.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


class ContextChunkingPolicy(Enum):
    """TensorRT-LLM's policy of the same name: who gets the rows that are left for contexts, with chunked context.

    FIRST_COME_FIRST_SERVED computes the oldest context as far as there are rows, then the next.
    EQUAL_PROGRESS gives every context a block's worth of tokens in turn.
    """

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


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
        max_queue_size: Most sequences of one priority or higher that wait beyond the free slots; 0: no bound.
        context_chunking_policy: How contexts share an iteration; only with enable_chunked_context.
    """

    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    max_num_tokens: int = 8192
    enable_chunked_context: bool = False
    enable_kv_cache_reuse: bool = True
    max_num_requests: int = -1
    max_beam_width: int | None = None
    max_queue_size: int = 0
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED

    def validate(self, max_num_sequences: int, tokens_per_block: int) -> None:
        """Raise ConfigError when this cannot work on an engine of so many slots and blocks of such a size."""
        if self.max_num_tokens < max_num_sequences:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must be at least max_batch_size "
                f"({max_num_sequences}), so that every running request gets a token in an iteration"
            )
        if self.max_num_tokens < tokens_per_block:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must hold at least one KV block of "
                f"{tokens_per_block} tokens, because long contexts are computed in chunks of blocks"
            )
        if self.max_beam_width is not None and self.max_beam_width > max_num_sequences:
            raise ConfigError(
                f"max_beam_width is {self.max_beam_width}; it can be at most max_batch_size "
                f"({max_num_sequences}), because every beam runs as a sequence of the batch"
            )
        beside_others = max_num_sequences - 1 + tokens_per_block
        if self.enable_chunked_context and self.max_num_tokens < beside_others:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; with enable_chunked_context it must be at least "
                f"{beside_others}, so that a chunk of one KV block ({tokens_per_block} tokens) fits beside "
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
