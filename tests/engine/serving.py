"""Runs requests through scheduler and engine without a loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inflight.config import CapacityPolicy, EngineConfig, SchedulingConfig
from inflight.core.ports import Engine
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, StoredAdapter
from inflight.core.request.guide import GuideEvent
from inflight.core.request.request import FloatTensor, IterationInput, Request
from inflight.core.request.response import Response, SequenceResult, merge_responses
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from inflight.testing.simulation.integrity import check_integrity

CHUNK_TOKENS = 32
WAYS = {
    "no-evict": {},
    "utilization": {"policy": CapacityPolicy.MAX_UTILIZATION},
    "chunked": {"max_num_tokens": CHUNK_TOKENS, "enable_chunked_context": True},
    "no-reuse": {"enable_kv_cache_reuse": False},
    "utilization-chunked-no-reuse": {
        "policy": CapacityPolicy.MAX_UTILIZATION,
        "max_num_tokens": CHUNK_TOKENS,
        "enable_chunked_context": True,
        "enable_kv_cache_reuse": False,
    },
}
"""Changes to a SchedulingConfig that do not change any token."""


def config_of(way: str, **changes: Any) -> SchedulingConfig:
    """Return the configuration of one of WAYS."""
    return SchedulingConfig(**{"max_num_tokens": 512, **WAYS[way], **changes})


def load(
    folder: Path,
    num_blocks: int,
    max_num_sequences: int = 4,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    **changes: Any,
) -> ModelEngine:
    """Return a float32 engine on the CPU with blocks of 8 tokens."""
    values = {"dtype": "float32", "device": "cpu", "max_num_tokens": 512, "tokens_per_block": 8, **changes}
    config = EngineConfig(
        str(folder),
        max_num_sequences=max_num_sequences,
        max_tokens_in_paged_kv_cache=values["tokens_per_block"] * num_blocks,
        **values,
    )
    return load_engine(config, processors)


@dataclass
class Served:
    """All results of a run.

    Attributes:
        responses: By request id and sequence index, in order.
        num_pauses: Number of pauses of all requests.
        num_iterations: Number of forward passes.
        num_context_tokens: Number of known tokens that were computed as context.
        most_in_flight: Maximum number of batches that were started but not decoded.
        errors: By request id, for requests that may fail.
    """

    responses: dict[tuple[int, int], list[Response]] = field(default_factory=dict)
    num_pauses: int = 0
    num_iterations: int = 0
    num_context_tokens: int = 0
    most_in_flight: int = 0
    errors: dict[int, Exception] = field(default_factory=dict)

    def result(self, request: Request | int, sequence_index: int = 0) -> SequenceResult:
        """Return all of a sequence's responses merged into one."""
        request_id = request if isinstance(request, int) else request.request_id
        return merge_responses(self.responses[request_id, sequence_index]).result

    def tokens(self, request: Request | int, sequence_index: int = 0, beam: int = 0) -> list[int]:
        """Return the generated tokens."""
        result = self.result(request, sequence_index)
        length = result.num_output_tokens[beam]
        return list(result.output_token_ids[beam][len(result.output_token_ids[beam]) - length :])

    def beams(self, request: Request) -> list[list[int]]:
        """Return the generated tokens of every beam, best first."""
        count = len(self.result(request).output_token_ids)
        return [self.tokens(request, beam=beam) for beam in range(count)]


def serve(
    engine: Engine,
    config: SchedulingConfig,
    requests: Sequence[Request],
    per_iteration: int = 2,
    stops: Mapping[int, int] | None = None,
    may_fail: Container[int] = (),
    adapters: Mapping[int, StoredAdapter] | None = None,
) -> Served:
    """Run `requests` until all have ended; `per_iteration` of them arrive in each iteration.

    `stops`: iteration in which a request is stopped, by id. `may_fail`: ids of requests that may end with an
    error. `adapters`: the adapters of requests with `lora`, by id of the request.
    """
    scheduler = Scheduler(config, engine.limits)
    served = Served()
    in_flight: deque[tuple[ScheduledBatch, Any]] = deque()
    for iteration in itertools.count():
        arriving = tuple(requests[per_iteration * iteration : per_iteration * (iteration + 1)])
        stopped = tuple(
            StopSignal(key, StopReason.CANCELLED) for key, when in (stops or {}).items() if when == iteration
        )
        guides = tuple(GuideEvent(each.request_id) for each in arriving if each.guide is not None)
        uses = {each.request_id: (adapters or {})[each.request_id] for each in arriving if each.lora}
        events = tuple(AdapterEvent(key, adapter.handle) for key, adapter in uses.items())
        update = AdapterUpdate(tuple(uses.values()), events)
        responses = scheduler.accept(IterationInput(iteration, 0, arriving, stopped, guides, update))
        batch = scheduler.schedule()
        if batch is not None:
            served.num_iterations += 1
            served.num_context_tokens += sum(
                len(chunk.token_ids) - chunk.num_draft_tokens
                for chunk in batch.context
                if not chunk.is_generation
            )
            served.num_pauses += scheduler.stats(batch).num_paused_requests
            in_flight.append((batch, engine.forward(batch)))
            served.most_in_flight = max(served.most_in_flight, len(in_flight))
        num_due = engine.limits.num_due(len(in_flight), batch)
        for _ in range(num_due):
            oldest, logits = in_flight.popleft()
            responses += scheduler.update(oldest, engine.decode(oldest, logits))
        check_integrity(scheduler)
        for response in responses:
            if response.error is not None and response.request_id in may_fail:
                served.errors[response.request_id] = response.error
                continue
            assert response.error is None, response.error
            served.responses.setdefault((response.request_id, response.sequence_index), []).append(response)
        if batch is None and not in_flight and scheduler.num_active == 0:
            break
        assert batch is not None or num_due, "requests are active, and nothing runs"
    return served


def to_torch(tensor: FloatTensor) -> torch.Tensor:
    """Return the values that a response contains."""
    return torch.from_numpy(np.frombuffer(tensor.data, dtype=np.float32).copy()).view(tensor.shape)
