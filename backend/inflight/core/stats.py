"""Statistics of one iteration: plain counters, and the JSON that ReturnBatchManagerStats hands out.

Keys, their spelling and the timestamp's format are the specification's (The Batch Manager, Statistics).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Counters after an iteration.

    Attributes:
        iteration: Count of iterations.
        num_active_requests: Waiting, running and paused ones.
        max_num_requests: Most requests that can run at a time.
        max_num_blocks: KV cache blocks.
        num_free_blocks: Blocks that no running request holds; cached ones are among them.
        tokens_per_block: Tokens per block.
        num_scheduled_requests: Requests in this iteration's batch.
        num_context_requests: Of those, in the context phase.
        num_generation_requests: Of those, in the generation phase.
        num_context_tokens: Tokens over the context chunks.
        micro_batch_id: Which of the micro-batches in flight.
        num_waiting_requests: Not running: never started, or paused.
        num_paused_requests: Pauses in this iteration.
        num_reused_blocks: Blocks that admissions found in the cache, since the start.
        num_missed_blocks: Full blocks that admissions did not find there, since the start.
    """

    iteration: int
    num_active_requests: int
    max_num_requests: int
    max_num_blocks: int
    num_free_blocks: int
    tokens_per_block: int
    num_scheduled_requests: int
    num_context_requests: int
    num_generation_requests: int
    num_context_tokens: int
    micro_batch_id: int
    num_waiting_requests: int
    num_paused_requests: int
    num_reused_blocks: int
    num_missed_blocks: int

    def to_json(self, wall_clock_s: float) -> str:
        """The specification's JSON object for in-flight batching; `wall_clock_s` is seconds since the epoch."""
        return json.dumps(
            {
                "Timestamp": time.strftime("%m-%d-%Y %H:%M:%S", time.localtime(wall_clock_s)),
                "Iteration Counter": self.iteration,
                "Active Request Count": self.num_active_requests,
                "Max Request Count": self.max_num_requests,
                "Max KV cache blocks": self.max_num_blocks,
                "Free KV cache blocks": self.num_free_blocks,
                "Used KV cache blocks": self.max_num_blocks - self.num_free_blocks,
                "Tokens per KV cache block": self.tokens_per_block,
                "Scheduled Requests": self.num_scheduled_requests,
                "Context Requests": self.num_context_requests,
                "Generation Requests": self.num_generation_requests,
                "Total Context Tokens": self.num_context_tokens,
                "MicroBatch ID": self.micro_batch_id,
            }
        )
