"""Short ways to make core objects, with defaults that fit together."""

from __future__ import annotations

from typing import Any

from inflight.config import CapacityPolicy, ChunkingPolicy, SchedulePolicy, SchedulingConfig
from inflight.core.kv.block_keys import CacheRules
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.llm_request import LlmRequest, RequestGroup
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.integrity import check_integrity


def make_request(request_id: int = 1, prompt: int | tuple[int, ...] = 4, new: int = 4, **fields) -> Request:
    """A request of `prompt` tokens (a count, or the ids)."""
    ids = tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id, ids, new, **fields)


def make_limits(
    num_blocks: int = 16,
    tokens_per_block: int = 4,
    max_num_sequences: int = 4,
    max_sequence_length: int = 256,
    num_micro_batches: int = 1,
    overlaps_iterations: bool = False,
    logits_post_processors: tuple[str, ...] = (),
    num_adapter_pages: int = 0,
    hidden_size: int = 0,
    num_state_snapshots: int = 0,
    break_even_rows: int = 256,
) -> EngineLimits:
    return EngineLimits(
        1000,
        max_sequence_length,
        max_num_sequences,
        num_blocks,
        tokens_per_block,
        num_micro_batches,
        overlaps_iterations,
        logits_post_processors=logits_post_processors,
        num_adapter_pages=num_adapter_pages,
        break_even_rows=break_even_rows,
        adapter_page_rank=8,
        max_adapter_rank=64,
        has_state=num_state_snapshots > 0,
        num_state_snapshots=num_state_snapshots,
        hidden_size=hidden_size,
    )


def make_prompt_table(num_rows: int = 3, hidden_size: int = 2, fill: int = 0) -> PromptTable:
    """A prompt table whose bytes all are `fill`."""
    data = RawBuffer(bytes([fill]) * (4 * num_rows * hidden_size))
    return PromptTable.of(Matrix((num_rows, hidden_size), "float32", data))


def with_table(table: PromptTable | None = None, **fields: Any) -> Request:
    """A request with a prompt table."""
    return make_request(prompt_table=table or make_prompt_table(), **fields)


def make_scheduler(
    policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
    max_num_tokens: int = 64,
    chunked: bool = False,
    reuse: bool = False,
    max_num_requests: int = -1,
    max_queue_size: int = 0,
    chunking_policy: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED,
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS,
    max_overtaken: int = 32,
    **limits: Any,
) -> Scheduler:
    config = SchedulingConfig(
        policy,
        max_num_tokens=max_num_tokens,
        enable_chunked_context=chunked,
        enable_kv_cache_reuse=reuse,
        max_num_requests=max_num_requests,
        max_queue_size=max_queue_size,
        context_chunking_policy=chunking_policy,
        schedule_policy=schedule_policy,
        max_overtaken=max_overtaken,
    )
    return Scheduler(config, make_limits(**limits))


def make_sequences(key: int = 0, **fields) -> list[LlmRequest]:
    """The sequences of a request without a scheduler, under consecutive keys from `key`."""
    return RequestGroup(make_request(**fields), key, CacheRules(None), now_ns=0).sequences


def make_sequence(key: int = 0, **fields) -> LlmRequest:
    """The first sequence of a request without a scheduler, under `key`."""
    return make_sequences(key, **fields)[0]


class Driver:
    """Feeds a scheduler with hand-made model outputs: token 500 + iteration for every row."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.iteration = 0

    def accept(
        self, *requests: Request, stop: tuple[int | StopSignal, ...] = (), now_ns: int = 0
    ) -> list[Response]:
        signals = tuple(one if isinstance(one, StopSignal) else StopSignal(one) for one in stop)
        responses = self.scheduler.accept(IterationInput(self.iteration, now_ns, requests, signals))
        self.iteration += 1
        return responses

    def step(self, token: int | None = None, now_ns: int = 0) -> tuple[ScheduledBatch | None, list[Response]]:
        batch = self.scheduler.schedule()
        if batch is None:
            return None, []
        tokens = [(500 + self.iteration if token is None else token,) for _ in batch.sampled_slots()]
        self.iteration += 1
        responses = self.scheduler.update(batch, ModelOutput(batch.iteration, tokens), now_ns)
        check_integrity(self.scheduler)
        return batch, responses
