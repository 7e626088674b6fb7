"""What one random seed draws: a configuration, requests of every kind, stops and failures."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inflight.core.batch import EngineLimits
from inflight.core.config import CapacitySchedulerPolicy, SchedulerConfig
from inflight.core.output_config import OutputConfig
from inflight.core.request import ExternalDraft, Request
from inflight.core.sampling_config import SamplingConfig
from inflight.core.stop import StopSignal
from inflight.testing.fake_engine import expected_tokens

VOCABULARIES = (3, 7, 23)
"""Small ones make a fake model that repeats itself, so that n-grams are found again and guesses come true."""


@dataclass(frozen=True)
class Scenario:
    """A whole run, before it happens."""

    seed: int
    limits: EngineLimits
    config: SchedulerConfig
    depth: int  # batches in flight: 1 is the plain loop, 2 schedules ahead of the device
    arrivals: dict[int, list[Request]]
    stops: dict[int, list[StopSignal]]
    requests: dict[int, Request]
    failures: frozenset[int]  # iterations whose batch comes back as an error


def draw(seed: int) -> Scenario:
    """A scenario in which every request can run, but rarely all at once."""
    rng = random.Random(seed)
    vocab_size, num_sequences = rng.choice(VOCABULARIES), rng.choice([1, 2, 3, 4, 6, 10])
    tokens_per_block = rng.choice([1, 2, 3, 4, 8])
    requests = _draw_requests(rng, vocab_size, num_sequences)
    most_blocks = max(request.max_kv_blocks(tokens_per_block) for request in requests)
    num_blocks = most_blocks + rng.choice([0, 1, 3, 10, 40])
    limits = EngineLimits(vocab_size, 200, num_sequences, num_blocks, tokens_per_block)
    chunked = rng.random() < 0.5
    longest_draft = max(request.draft_length for request in requests)
    needed = num_sequences - 1 + tokens_per_block + longest_draft
    if not chunked:
        whole = [request.prompt_length + request.draft_length for request in requests]
        needed = max(num_sequences, tokens_per_block, *whole)
    config = SchedulerConfig(
        policy=rng.choice(list(CapacitySchedulerPolicy)),
        max_num_tokens=needed + rng.choice([0, 1, 5, 100]),
        enable_chunked_context=chunked,
        enable_kv_cache_reuse=rng.random() < 0.7,
    )
    window = rng.choice([0, 3, 30])
    arrivals: dict[int, list[Request]] = {}
    stops: dict[int, list[StopSignal]] = {}
    for request in requests:
        arrival = rng.randint(0, window)
        arrivals.setdefault(arrival, []).append(request)
        if rng.random() < 0.2:
            stops.setdefault(arrival + rng.randint(0, 20), []).append(StopSignal(request.request_id))
    by_id = {request.request_id: request for request in requests}
    failures = frozenset(rng.sample(range(40), 3)) if rng.random() < 0.2 else frozenset()
    return Scenario(seed, limits, config, rng.choice([1, 1, 2]), arrivals, stops, by_id, failures)


def _draw_requests(rng: random.Random, vocab_size: int, num_sequences: int) -> list[Request]:
    prefixes = [_draw_tokens(rng, vocab_size, rng.randint(0, 24)) for _ in range(2)]
    requests = []
    for request_id in range(1, rng.randint(2, 9)):
        prompt = rng.choice(prefixes) + _draw_tokens(rng, vocab_size, rng.randint(1, 6))
        end_ids = _draw_tokens(rng, vocab_size, rng.choice([0, 0, 1, 1, 2]))
        most_beams = min(num_sequences, vocab_size // max(2, 1 + len(end_ids)))
        sampling = _draw_sampling(rng, most_beams)
        new = rng.randint(1, 20)
        alone = sampling.beam_width == 1
        requests.append(
            Request(
                request_id,
                prompt,
                new,
                streaming=rng.random() < 0.6,
                end_ids=end_ids,
                sampling=sampling,
                output=_draw_output(rng, vocab_size),
                stop_words=_draw_words(rng, vocab_size) if rng.random() < 0.3 else (),
                draft=_draw_draft(rng, vocab_size, prompt, new, sampling)
                if alone and new > 1 and rng.random() < 0.2
                else None,
                prompt_lookup_num_tokens=rng.choice([0, 0, 1, 4]) if alone else 0,
            )
        )
    return requests


def _draw_tokens(rng: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def _draw_words(rng: random.Random, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Mostly long enough not to come true at once."""
    return tuple(_draw_tokens(rng, vocab_size, rng.choice([1, 2, 2, 3, 3])) for _ in range(rng.randint(1, 3)))


def _draw_sampling(rng: random.Random, most_beams: int) -> SamplingConfig:
    penalty = rng.choice([1.0, 1.0, 1.0, 1.3])
    if most_beams > 1 and rng.random() < 0.3:
        beam_width = rng.randint(2, min(most_beams, 5))
        return SamplingConfig(
            beam_width=beam_width,
            num_return_sequences=rng.choice([None, 1, beam_width]),
            repetition_penalty=penalty,
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
            early_stopping=rng.randint(0, 2),
            beam_search_diversity_rate=rng.choice([0.0, 0.0, 0.5]),
        )
    sampled = rng.random() < 0.4
    return SamplingConfig(
        num_return_sequences=rng.choice([None, None, None, 2, 4]),
        top_k=3 if sampled else 0,
        random_seed=rng.randrange(5) if sampled else 0,
        repetition_penalty=penalty,
    )


def _draw_output(rng: random.Random, vocab_size: int) -> OutputConfig:
    def some() -> bool:
        return rng.random() < 0.2

    return OutputConfig(
        exclude_input_from_output=rng.random() < 0.5,
        return_log_probs=some(),
        num_top_log_probs=rng.randint(1, vocab_size) if some() else 0,
        return_prompt_log_probs=some(),
        return_context_logits=some(),
        return_generation_logits=some(),
        return_perf_metrics=some(),
    )


def _draw_draft(
    rng: random.Random, vocab_size: int, prompt: tuple[int, ...], new: int, sampling: SamplingConfig
) -> ExternalDraft:
    """What will come, with a mistake somewhere or nowhere."""
    count = rng.randint(1, min(6, new - 1))
    tokens = expected_tokens(prompt, count, vocab_size, sampling)
    if rng.random() < 0.7:
        tokens[rng.randrange(count)] = rng.randrange(vocab_size)
    return ExternalDraft(tuple(tokens))
