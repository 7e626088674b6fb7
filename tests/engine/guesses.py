"""The guesses of an engine's draft head, and requests whose tokens do not depend on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache
from tests.engine.kernels import needs_native
from tests.models.zoo import ZooModel

METRICS = OutputOptions(return_perf_metrics=True)
NUM_TOKENS = 24
KERNELS = pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_native), "torch"])
WAYS = ("no-evict", "utilization-chunked-no-reuse", "utilization")


@dataclass
class Guesses:
    """Collects what the head of an engine guesses: by request id, the number of known tokens and the guesses.

    Drafts are as long as requests allow, as if guesses took no time.
    """

    engine: ModelEngine
    found: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.limits = replace(self.engine.limits, guess_cost=0.0)
        head = self.engine.runner._draft_head
        guess = head.guess

        def listen(batch: ScheduledBatch, *arguments: Any) -> ScheduledBatch:
            self.owners |= {start.slot: start.request.request_id for start in batch.starts}
            guessed = guess(batch, *arguments)
            for chunk in guessed.context:
                if count := chunk.num_draft_tokens:
                    known = chunk.start + len(chunk.token_ids) - count
                    self.found.append((self.owners[chunk.slot], known, chunk.token_ids[-count:]))
            return guessed

        head.guess = listen


def make_requests(model: ZooModel, count: int = 6) -> list[Request]:
    """Return requests of which some have a prompt with a common beginning, and some sample."""
    samplings = (SamplingConfig(), SamplingConfig(temperature=0.9, top_k=20, random_seed=5))
    return [
        Request(
            number,
            (*model.prompt(17), *model.prompt(3 + 4 * number, number))[: 45 - number],
            NUM_TOKENS,
            sampling=samplings[number % 3 == 2],
            output=METRICS,
        )
        for number in range(count)
    ]


@torch.inference_mode()
def fill_with_garbage(cache: KvCache) -> None:
    """Fill all blocks but the null block with NaN, as sequences may leave them after an overflow."""
    for memory in cache._memories():
        if memory.is_floating_point():
            memory[:, :, : cache.null_block] = float("nan")
