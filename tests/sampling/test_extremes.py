"""Extreme values of all parameters together: no error, and the same tokens on all paths.

torch's operators and compiled code agree bitwise, and with the reference unless rounding decides. Other rows
of the batch get the same tokens as alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import LARGEST, SMALLEST
from inflight.sampling import reference
from inflight.sampling.row_kernels import RowKernels
from tests.engine.kernels import needs_native
from tests.sampling import factories
from tests.sampling.factories import Row, beams_of, decode_rows, make_request, make_sampler, start_batch
from tests.sampling.margins import is_apart, is_decided
from tests.tiers import examples

INF = math.inf
NATIVE = pytest.mark.parametrize("row_kernels", [pytest.param("native", marks=needs_native)], indirect=True)
ENDS = {
    "temperature": [0.0, SMALLEST, 0.7, LARGEST],
    "top_k": [0, 1, 2, 200, 2**31 - 1],
    "top_p": [0.0, 1.4e-45, 1e-320, 0.5, 1.0],
    "top_p_decay": [1.4e-45, 1.0, 1.0],
    "top_p_min": [0.0, 1.0],
    "min_p": [0.0, 0.0, 1.4e-45, 1.0],
    "repetition_penalty": [SMALLEST, 1.0, 1.3, LARGEST],
    "presence_penalty": [-LARGEST, 0.0, 0.3, LARGEST],
    "frequency_penalty": [-LARGEST, 0.0, 0.3, LARGEST],
    "min_length": [0, 2**31 - 1],
    "no_repeat_ngram_size": [0, 0, 1, 2, 2**31 - 1],
    "beam_search_diversity_rate": [0.0, LARGEST],
}
BIASES = [3.4e38, -3.4e38, INF, -INF, 1e30, -1e30, 1e-45, 0.0]
KINDS = [{}, {"top_k": 3}, {"top_k": 150}, {"top_p": 0.4}, {"top_p": 0.98}, {"top_p": 1.0}, {"min_p": 0.3}]


def extreme_request(numbers: random.Random, vocab_size: int, **always: object) -> Request:
    """Draw some parameters at their limits, and bans of a few tokens, of many or of all."""
    names = numbers.sample(sorted(ENDS), numbers.randint(0, 5))
    sampling: dict[str, object] = {name: numbers.choice(ENDS[name]) for name in names}
    bias = None
    if numbers.random() < 0.4:
        few = numbers.sample(BIASES, numbers.randint(1, 3))
        bias = [numbers.choice(few) for _ in range(vocab_size)]
    if numbers.random() < 0.2:
        sampling["allowed_token_ids"] = tuple(numbers.choices(range(vocab_size), k=numbers.randint(1, 5)))
    if numbers.random() < 0.3:
        values = [value for value in BIASES if value < INF]
        num_biased = numbers.randint(1, 4)
        sampling["logit_bias_ids"] = tuple(numbers.choices(range(vocab_size), k=num_biased))
        sampling["logit_bias_values"] = tuple(numbers.choices(values, k=num_biased))
    num_banned = numbers.choice([0, 0, 0, 1, vocab_size - 1, vocab_size])
    return make_request(
        numbers.choices(range(vocab_size), k=numbers.choice([1, 3, 3 * vocab_size])),
        end_ids=numbers.sample(range(vocab_size), numbers.randint(0, 2)),
        bad_words=[(token,) for token in numbers.sample(range(vocab_size), num_banned)],
        bias=bias,
        random_seed=numbers.getrandbits(64),
        **{**numbers.choice(KINDS), **sampling, **always},
    )


def _logits(numbers: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Draw logits with ties, zeros and -inf; some rows have the largest possible logits."""
    generator = torch.Generator().manual_seed(numbers.getrandbits(32))
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 12).round() / 4
    logits[::3] *= 1e4
    logits[1::4, 1::5] = -INF
    return logits


def _cancel_out(request: Request) -> bool:
    """Whether a logit may be nothing but rounding errors."""
    return request.sampling.presence_penalty * request.sampling.frequency_penalty < 0


def _check_reference(row: Row, logits: Sequence[Sequence[float]], tokens: Sequence[int]) -> bool:
    """Compare with the reference; return True if all of it could be compared."""
    if _cancel_out(row.request):
        return False
    expected = reference.verify_drafts(logits, row.request, row.tokens, row.drafts, row.sequence_index)
    known = list(row.tokens)
    for values, token in itertools.zip_longest(logits[: len(expected) + 1], expected):
        if not is_decided(values, row.request, known, row.sequence_index):
            return False
        known.append(token)
    assert list(tokens) == expected, row
    return True


@NATIVE
@pytest.mark.parametrize("vocab_size", [3, 10, 300])
def test_all_paths_choose_the_same_tokens(row_kernels: RowKernels, vocab_size: int) -> None:
    """Rows are greedy, sampled and with drafts, beside a plain row."""
    numbers, num_compared, num_impossible = random.Random(vocab_size), 0, 0
    num_batches = examples(fast=20, all=120)
    for _ in range(num_batches):
        requests = [extreme_request(numbers, vocab_size) for _ in range(6)]
        for request in requests:
            request.sampling.validate(vocab_size)
        drafts = tuple(numbers.choices(range(vocab_size), k=2))
        rows = [Row(request, (), 0, drafts if index < 2 else ()) for index, request in enumerate(requests)]
        rows.append(Row(make_request((1, 2))))
        logits = _logits(numbers, 7 + 4, vocab_size)
        logits[-1].nan_to_num_(neginf=-9.0)
        output = decode_rows(logits.clone(), rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factories, "ROW_KERNELS", [RowKernels()])
            assert decode_rows(logits.clone(), rows).token_ids == output.token_ids
        begins = np.cumsum([0, *(len(row.drafts) + 1 for row in rows)])
        for row, begin, end, tokens in zip(rows, begins, begins[1:], output.token_ids):
            num_compared += _check_reference(row, logits[begin:end].tolist(), tokens)
            num_impossible += not tokens
        assert output.token_ids[-1] == (int(logits[-1].argmax()),)
    assert num_compared > 2 * num_batches and num_impossible > num_batches // 2


@pytest.mark.usefixtures("row_kernels")
def test_a_device_that_overlaps_iterations_chooses_the_same_tokens() -> None:
    """A row with every token banned still gets a valid token as its next input."""
    numbers, num_impossible = random.Random(1), 0
    for _ in range(examples(fast=20, all=60)):
        requests = [extreme_request(numbers, 30, top_p_decay=1.0) for _ in range(30)]
        rows = [Row(request) for request in requests if not request.looks_back]
        logits = _logits(numbers, len(rows), 30)
        batch, positions = start_batch(rows)
        sampler, other = make_sampler(len(rows), 30), make_sampler(len(rows), 30)
        for each in (sampler, other):
            each.apply(batch)
        expected = other.decode(batch, logits.clone(), positions)
        choice = sampler.begin(batch, logits.clone(), positions)
        assert sampler.finish(batch, choice, positions).token_ids == expected.token_ids
        assert choice.tokens.min() >= 0
        num_impossible += expected.token_ids.count(())
    assert num_impossible > 30


@NATIVE
@pytest.mark.parametrize("vocab_size", [4, 300])
def test_all_paths_rank_the_same_beams(row_kernels: RowKernels, vocab_size: int) -> None:
    numbers, num_compared = random.Random(vocab_size), 0
    num_searches = examples(fast=50, all=150)
    for _ in range(num_searches):
        request = extreme_request(numbers, vocab_size, beam_width=3)
        request.sampling.validate(vocab_size)
        tokens = [[*request.input_token_ids, *numbers.choices(range(vocab_size), k=2)] for _ in range(3)]
        scores = [numbers.choice([0.0, -1.5, -30.0, -1e9, -INF]) for _ in range(3)]
        logits = _logits(numbers, 3, vocab_size)
        found = beams_of(logits.clone(), request, tokens, scores, 6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factories, "ROW_KERNELS", [RowKernels()])
            assert beams_of(logits.clone(), request, tokens, scores, 6) == found
        assert not any(math.isnan(score) or score == INF for score in found.scores)
        expected = reference.beam_candidates(logits.tolist(), request, tokens, scores, 7)
        rate = request.sampling.beam_search_diversity_rate
        ranks = [score + rate * row for row, _, score in expected]
        # A filler beam's score is so low that log probabilities vanish in it.
        is_clear = all(a == b == -INF or (a > -1e8 and is_apart(a, b)) for a, b in itertools.pairwise(ranks))
        is_clear &= not _cancel_out(request)
        rows = [reference.process(row, request, beam) for row, beam in zip(logits.tolist(), tokens)]
        if is_clear and all(is_apart(a, b) for row in rows for a, b in itertools.pairwise(sorted(row))):
            num_compared += 1
            assert list(zip(found.rows, found.token_ids)) == [each[:2] for each in expected[:6]]
    assert num_compared > num_searches // 8


@NATIVE
def test_penalties_are_rounded_the_same(row_kernels: RowKernels) -> None:
    """A fused multiply-add would differ in the last bit, and break ties of equal logits."""
    numbers = random.Random(3)
    rows, kernels = [], [row_kernels, RowKernels()]
    for _ in range(64):
        tokens = numbers.choices(range(50), k=200)
        penalties = {
            "repetition_penalty": numbers.uniform(0.5, 2),
            "presence_penalty": numbers.uniform(-1, 1),
            "frequency_penalty": numbers.uniform(-1, 1),
        }
        rows.append(Row(make_request(tokens, temperature=numbers.uniform(0.1, 2), **penalties)))
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3))
    found = []
    for kernel in kernels:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factories, "ROW_KERNELS", [kernel])
            found.append(logits.clone())
            decode_rows(found[-1], rows)
    assert torch.equal(*found)
