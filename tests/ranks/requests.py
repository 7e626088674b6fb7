"""The requests of the tests of several ranks, and their results as plain values."""

from __future__ import annotations

import random
from typing import Any

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.serving import Served, config_of

ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_tokens": 512,
    "tokens_per_block": 8,
    "max_num_sequences": 6,
}
NUM_BLOCKS = 24
CONFIG = config_of("utilization-chunked-no-reuse")
STOPPED, GUILTY = 20, 21
"""Ids of a request that is stopped after some tokens, and of one whose logits become NaN."""
DETAILS = OutputOptions(return_log_probs=True, num_top_log_probs=2, return_context_logits=True)


def _prompt(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(3, 200) for _ in range(length))


def make_requests() -> list[Request]:
    """Make requests whose results do not depend on the other requests."""
    sampled = SamplingConfig(temperature=0.9, top_k=30, random_seed=11, repetition_penalty=1.1)
    penalized = SamplingConfig(
        frequency_penalty=0.4, presence_penalty=0.3, no_repeat_ngram_size=3, min_length=5
    )
    several = SamplingConfig(num_return_sequences=2, top_p=0.9, random_seed=2)
    return [
        Request(1, _prompt(30), 16, streaming=True),
        Request(2, _prompt(45), 16, sampling=sampled, output=DETAILS),
        Request(3, _prompt(11), 12, sampling=SamplingConfig(beam_width=3)),
        Request(4, _prompt(20) * 2, 16, prompt_lookup_num_tokens=3),
        Request(5, _prompt(9), 20, sampling=penalized, end_ids=(7,), bad_words=((11,), (12, 13))),
        Request(6, _prompt(14), 18, sampling=several),
        Request(7, _prompt(25), 12, draft=ExternalDraft((5, 6, 7)), output=DETAILS),
        *(Request(number, _prompt(number - 3), 40) for number in (8, 9, 10)),
    ]


def make_doomed() -> list[Request]:
    """Make a request that is stopped and one that fails."""
    return [Request(STOPPED, _prompt(17), 100, streaming=True), Request(GUILTY, _prompt(19), 30)]


def answers(served: Served) -> list[Any]:
    """Return the results of all sequences as JSON values, in the order of ids; of context logits only the
    shape."""
    found = []
    for key in sorted(served.responses):
        result = served.result(*key)
        logits = result.context_logits
        found.append(
            {
                "key": list(key),
                "tokens": [list(ids) for ids in result.output_token_ids],
                "reasons": [reason.name for reason in result.finish_reasons],
                "log_probs": [list(values) for values in result.log_probs or ()],
                "context": None if logits is None else list(logits.shape),
            }
        )
    return found
