"""The requests of the tests of several ranks, and what came of them as plain values."""

from __future__ import annotations

import random

from inflight.core.request import Request
from inflight.core.sampling_config import SamplingConfig
from tests.engine.serving import Served, config_of
from tests.models.zoo import VOCAB_SIZE

ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_tokens": 512,
    "tokens_per_block": 8,
    "max_num_sequences": 4,
    "max_tokens_in_paged_kv_cache": 8 * 24,
}
CONFIG = config_of("utilization-chunked-no-reuse")


def make_requests() -> list[Request]:
    rng = random.Random(5)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))

    sampled = SamplingConfig(temperature=0.9, top_k=30, random_seed=11, repetition_penalty=1.1)
    return [
        Request(1, prompt(30), 16),
        Request(2, prompt(45), 16, sampling=sampled),
        Request(3, prompt(11), 12, sampling=SamplingConfig(beam_width=3)),
        Request(4, prompt(20), 16, prompt_lookup_num_tokens=3),
    ]


def answers(served: Served) -> dict[str, list[list[int]]]:
    """Token ids by request, of every beam."""
    return {str(request.request_id): served.beams(request) for request in make_requests()}
