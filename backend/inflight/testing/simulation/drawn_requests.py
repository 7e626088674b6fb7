"""Random requests of every kind: prompts with common beginnings, identities, beams, drafts, outputs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TypeVar

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.testing.fake_model import Conditions, expected_tokens
from inflight.testing.small_inputs import make_table

from .host_cache import NUM_TASKS, digest_of

_T = TypeVar("_T")

_TABLES = (None, make_table(b"one table"), make_table(b"another table"))
_EXTRA_IDS = (0, 7, 8)
PICTURE_TABLE = make_table(b"rows of pictures", 11)
"""The prompt table of all pictures."""


@dataclass(frozen=True)
class Habits:
    """Settings that the requests of one scenario have in common.

    Attributes:
        vocab_size: Size of the vocabulary. With a small one the fake model repeats itself, so that n-grams recur
            and drafts are accepted.
        num_slots: Maximum number of beams of a search.
        identities, tables, adapters, priorities, client_ids: The values of which each request gets one.
        retains: Fraction of the requests with retention settings.
        searches: Fraction of beam searches.
        expires: Fraction of the requests with a deadline.
    """

    vocab_size: int
    num_slots: int
    identities: tuple[PrefixIdentity, ...]
    tables: tuple[PromptTable | None, ...]
    adapters: tuple[LoraRequest | None, ...]
    priorities: tuple[float, ...]
    client_ids: tuple[int, ...]
    retains: float
    searches: float
    expires: float


def draw_habits(rng: random.Random) -> Habits:
    """Draw settings; each kind of variety occurs in some scenarios only, so that all mixtures occur."""

    def sometimes(values: tuple[_T, ...]) -> tuple[_T, ...]:
        return values if rng.random() < 0.4 else values[:1]

    return Habits(
        vocab_size=rng.choice([3, 7, 23]),
        num_slots=rng.choice([1, 2, 4, 6, 8, 12]),
        identities=sometimes((PrefixIdentity(), PrefixIdentity(1), PrefixIdentity(2))),
        tables=sometimes(_TABLES),
        adapters=sometimes(
            (None, *map(LoraRequest, rng.sample(range(NUM_TASKS), rng.randint(1, NUM_TASKS))))
        ),
        priorities=sometimes((0.5, 0.5, 0.0, 1.0)),
        client_ids=sometimes((0, 1, 2)),
        retains=rng.choice([0.0, 0.0, 0.6]),
        searches=rng.choice([0.0, 0.2, 0.4]),
        expires=rng.choice([0.0, 0.0, 0.4]),
    )


def draw_requests(rng: random.Random, habits: Habits) -> list[Request]:
    """Draw two to eight requests with consecutive ids from 1."""
    prefixes = [draw_tokens(rng, habits.vocab_size, rng.randint(0, 24)) for _ in range(2)]
    extra_ids = [tuple(rng.choices(_EXTRA_IDS, (20, 1, 1), k=30)) for _ in range(2)]
    return [
        _draw_request(rng, habits, request_id, rng.choice(prefixes), rng.choice(extra_ids))
        for request_id in range(1, rng.randint(3, 9))
    ]


def _draw_request(
    rng: random.Random, habits: Habits, request_id: int, prefix: tuple[int, ...], extra_ids: tuple[int, ...]
) -> Request:
    vocab_size = habits.vocab_size
    prompt = prefix + draw_tokens(rng, vocab_size, rng.randint(1, 6))
    identity = rng.choice(habits.identities)
    if len(habits.identities) > 1 and rng.random() < 0.4:
        identity = replace(identity, extra_ids=extra_ids[: len(prompt)])
    end_ids = draw_tokens(rng, vocab_size, rng.choice([0, 0, 0, 1, 2]))
    sampling = _draw_sampling(
        rng, habits.searches, min(habits.num_slots, vocab_size // max(2, 1 + len(end_ids)))
    )
    new, alone = rng.randint(1, 20), sampling.beam_width == 1
    request = Request(
        request_id,
        prompt,
        new,
        streaming=rng.random() < 0.6,
        end_ids=end_ids,
        sampling=sampling,
        output=_draw_output(rng, vocab_size),
        stop_words=_draw_words(rng, vocab_size) if rng.random() < 0.2 else (),
        prompt_lookup_num_tokens=rng.choice([0, 0, 1, 4]) if alone else 0,
        identity=identity,
        retention=_draw_retention(rng, len(prompt)) if rng.random() < habits.retains else RetentionConfig(),
        priority=rng.choice(habits.priorities),
        client_id=rng.choice(habits.client_ids),
        allotted_time_ms=rng.randint(1, 200) if rng.random() < habits.expires else 0,
        lora=rng.choice(habits.adapters),
        prompt_table=rng.choice(habits.tables),
    )
    if request.prompt_table is not None:
        request = _with_rows(request, request.prompt_table.num_rows, vocab_size)
    if alone and new > 1 and rng.random() < 0.2:
        request = replace(request, draft=_draw_draft(rng, vocab_size, request))
    return request


def _with_rows(request: Request, num_rows: int, vocab_size: int) -> Request:
    """Replace tokens of a request's prompt by rows of its prompt table; equal beginnings of prompts stay equal."""
    ids = request.input_token_ids
    prompt = tuple(
        vocab_size + token_id % num_rows if sum(ids[: place + 1]) % 3 == 0 else token_id
        for place, token_id in enumerate(ids)
    )
    output = replace(request.output, return_prompt_log_probs=False)  # a table row has no log prob
    return replace(request, input_token_ids=prompt, output=output)


def with_pictures(request: Request, vocab_size: int, seed: int) -> Request:
    """Replace stretches of a request's prompt by pictures, mostly the same in all requests of a scenario.

    Pictures have rows of `PICTURE_TABLE`, which extra ids identify. Equal beginnings of prompts often stay equal,
    and of two pictures with equal first rows one may be longer.
    """
    common, own = random.Random(seed), random.Random(f"{seed} {request.request_id}")
    num_rows = PICTURE_TABLE.num_rows
    ids, extra = list(request.input_token_ids), list(request.identity.extra_ids)
    extra += [0] * (len(ids) - len(extra))
    at = common.randint(0, 3)
    while at < len(ids):
        first, length = common.randrange(num_rows), common.randint(1, 9)
        if own.random() < 0.3:
            length = own.randint(1, 9)
        for place in range(at, min(at + length, len(ids))):
            row = (first + place - at) % num_rows
            ids[place], extra[place] = vocab_size + row, 100 + row
        at += max(length, 1) + common.choice([0, 1, 1, 2, 7])
    output = replace(request.output, return_prompt_log_probs=False)
    return replace(
        request,
        input_token_ids=tuple(ids),
        identity=replace(request.identity, extra_ids=tuple(extra)),
        output=output,
        prompt_table=PICTURE_TABLE,
    )


def draw_tokens(rng: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    """Draw `count` token ids below `vocab_size`."""
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def _draw_words(rng: random.Random, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Draw stop words, most of them longer than one token."""
    return tuple(draw_tokens(rng, vocab_size, rng.choice([1, 2, 2, 3, 3])) for _ in range(rng.randint(1, 3)))


def _draw_sampling(rng: random.Random, searches: float, most_beams: int) -> SamplingConfig:
    penalty = rng.choice([1.0, 1.0, 1.0, 1.3])
    if most_beams > 1 and rng.random() < searches:
        beam_width = min(most_beams, rng.choice([2, 2, 3, 5]))
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


def _draw_output(rng: random.Random, vocab_size: int) -> OutputOptions:
    def some() -> bool:
        return rng.random() < 0.15

    return OutputOptions(
        exclude_input_from_output=rng.random() < 0.5,
        return_log_probs=some(),
        num_top_log_probs=rng.randint(1, vocab_size) if some() else 0,
        return_prompt_log_probs=some(),
        return_context_logits=some(),
        return_generation_logits=some(),
        return_perf_metrics=rng.random() < 0.3,
    )


def _draw_retention(rng: random.Random, prompt_length: int) -> RetentionConfig:
    """Draw retention of up to two ranges of the prompt, and perhaps of generated blocks."""
    places = sorted(rng.sample(range(prompt_length + 4), 4))
    ends: tuple[int | None, ...] = (places[1], rng.choice([places[3], None]))
    ranges = tuple(TokenRangeRetention(start, end, _draw_worth(rng)) for start, end in zip(places[::2], ends))
    return RetentionConfig(ranges[: rng.randint(0, 2)], rng.choice([None, _draw_worth(rng)]))


def _draw_worth(rng: random.Random) -> Retention:
    return Retention(rng.choice([0, 20, 35, 50, 100]), rng.choice([None, 1, 20, 100]))


def _draw_draft(rng: random.Random, vocab_size: int, request: Request) -> ExternalDraft:
    """Draw a draft of the next tokens with at most one mistake."""
    count = rng.randint(1, min(6, request.max_new_tokens - 1))
    conditions = Conditions.of(request, digest_of(request.lora) if request.lora else b"")
    tokens = expected_tokens(
        request.input_token_ids, count, vocab_size, request.sampling, conditions=conditions
    )
    if rng.random() < 0.7:
        tokens[rng.randrange(count)] = rng.randrange(vocab_size)
    return ExternalDraft(tuple(tokens))
