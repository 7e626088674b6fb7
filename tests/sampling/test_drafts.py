"""Draft tokens: acceptance by equality or at random, and a sequence's state after rejected ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request.request import Request
from inflight.core.schedule.batch import ContextChunk, ScheduledBatch, SlotStart
from inflight.sampling import reference
from inflight.sampling.rng import Purpose
from tests.sampling.factories import Row, decode_rows, make_request, make_sampler
from tests.sampling.margins import MARGIN, draw_is_clear, is_decided
from tests.sampling.strategies import logits_rows, requests
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("row_kernels")

seeded = settings(max_examples=examples(fast=40, all=200), deadline=None, derandomize=True)


def _logits(*best: int, vocab_size: int = 10) -> torch.Tensor:
    """Rows whose likeliest token is given."""
    rows = torch.zeros(len(best), vocab_size)
    rows[range(len(best)), list(best)] = 5.0
    return rows


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ((4, 5, 6), (4, 5, 6, 7)),
        ((4, 5, 9), (4, 5, 6)),
        ((9, 5, 6), (4,)),
        ((4,), (4, 5)),
    ],
)
@pytest.mark.parametrize("with_logits", [False, True])
def test_greedy_drafts_are_accepted_while_they_equal_the_token(
    drafts: tuple[int, ...], expected: tuple[int, ...], with_logits: bool
) -> None:
    count = len(drafts)
    request = make_request(drafts=drafts, draft_logits=torch.randn(count, 10) if with_logits else None)
    output = decode_rows(_logits(4, 5, 6, 7)[: count + 1], [Row(request, drafts=drafts)])
    assert output.token_ids == [expected]


@given(st.data())
@seeded
def test_randomly_accepted_drafts_equal_those_of_the_reference(data: st.DataObject) -> None:
    vocab_size, count = data.draw(st.sampled_from([3, 10])), data.draw(st.integers(1, 3))
    rows = data.draw(logits_rows(count + 1, vocab_size))
    proposed = data.draw(logits_rows(count, vocab_size))
    drafts = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=count, max_size=count))
    threshold = data.draw(st.sampled_from([None, 0.0, 0.3, 1.0, 2.0]))
    plain = data.draw(requests(vocab_size))
    request = _with_draft(plain, drafts, proposed, threshold)
    row = Row(request, drafts=tuple(drafts), sequence_index=data.draw(st.integers(0, 3)))
    output = decode_rows(torch.tensor(rows), [row])
    expected = reference.verify_drafts(rows, request, row.tokens, drafts, row.sequence_index, proposed)
    if all(_is_clear(row, index, values, proposed) for index, values in enumerate(rows)):
        assert output.token_ids == [tuple(expected)]


def _with_draft(
    plain: Request, drafts: list[int], proposed: list[list[float]], threshold: float | None
) -> Request:
    draft = make_request(drafts=drafts, draft_logits=proposed, threshold=threshold).draft
    return replace(plain, draft=draft)


def _is_clear(row: Row, index: int, values: list[float], proposed: list[list[float]]) -> bool:
    """Whether rounding cannot change acceptance or token."""
    request, known = row.request, [*row.tokens, *row.drafts[:index]]
    if not is_decided(values, request, known, row.sequence_index):
        return False
    if index == len(row.drafts):
        return True
    seed, threshold = request.sampling.random_seed, request.draft.acceptance_threshold
    target = reference.distribution(values, request, known)
    if not target:
        return True
    shares, draft = reference.softmax(proposed[index]), row.drafts[index]
    number = reference.uniform(seed, row.sequence_index, len(known), Purpose.ACCEPT)
    needed = shares[draft] * (number if threshold is None else threshold)
    if abs(target.get(draft, 0.0) - needed) < MARGIN:
        return False
    rest = {token: max(0.0, share - shares[token]) for token, share in target.items()}
    total = sum(rest.values())
    number = reference.uniform(seed, row.sequence_index, len(known), Purpose.RESAMPLE)
    return total > 0.01 and draw_is_clear({token: share / total for token, share in rest.items()}, number)


def test_a_threshold_replaces_random_acceptance() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(2, 1)
    proposed = torch.tensor([[0.25, 0.5, 0.25]]).log()
    for drafted, ratio in ((0, 2.0), (1, 0.6), (2, 0.8)):
        for threshold, accepted in ((ratio - 0.05, True), (ratio + 0.05, False)):
            for seed in range(20):
                request = make_request(
                    drafts=[drafted],
                    draft_logits=proposed,
                    threshold=threshold,
                    top_p=1.0,
                    random_seed=seed,
                )
                (tokens,) = decode_rows(target.clone(), [Row(request, drafts=(drafted,))]).token_ids
                assert len(tokens) == (2 if accepted else 1)


def test_no_threshold_lets_a_banned_token_pass() -> None:
    request = make_request(
        drafts=[3], draft_logits=torch.zeros(1, 10), threshold=0.0, bad_words=[(3,)], top_k=4
    )
    (tokens,) = decode_rows(torch.zeros(2, 10), [Row(request, drafts=(3,))]).token_ids
    assert len(tokens) == 1 and tokens[0] in (0, 1, 2, 4)


def test_draft_logits_apply_only_to_the_requests_own_draft() -> None:
    """Later drafts by prompt lookup are accepted by equality."""
    proposed = torch.full((1, 10), -math.inf)
    proposed[0, 4] = 0.0
    logits = _logits(4, 5)
    cases = [
        ContextChunk(0, 1, (0, 4), True, 1, is_generation=True),
        ContextChunk(0, 1, (0, 5), True, 1),
        ContextChunk(0, 2, (0, 4), True, 1),
    ]
    for chunk in cases:
        for seed in range(30):
            request = make_request([0, 0], drafts=[4], draft_logits=proposed, top_p=1.0, random_seed=seed)
            sampler = make_sampler(1, 10)
            batch = ScheduledBatch(0, starts=(SlotStart(0, request),), context=(chunk,))
            sampler.apply(batch)
            sampler.apply_drafts(batch)
            positions = np.array([chunk.start + 1, chunk.start + 2])
            (tokens,) = sampler.decode(batch, logits.clone(), positions).token_ids
            known = [0] * (chunk.start + 1)
            expected = reference.verify_drafts(logits.tolist(), request, known, chunk.token_ids[1:])
            assert list(tokens) == expected


def test_a_rejected_draft_is_forgotten() -> None:
    """The next row's penalties count the accepted tokens and the token in place of the rejected one."""
    request = make_request([1], presence_penalty=100.0)
    sampler = make_sampler(1, 10)
    logits = _logits(4, 5, 6, 7)
    row = Row(request, drafts=(4, 9, 8))
    assert decode_rows(logits, [row], sampler).token_ids == [(4, 5)]
    batch = ScheduledBatch(0, generation_slots=(0,))
    sampler.apply(batch)
    sampler.apply_drafts(batch)
    values = torch.zeros(1, 10)
    values[0, [1, 4, 5]] = 50.0
    values[0, [8, 9]] = torch.tensor([2.0, 1.0])
    assert sampler.decode(batch, values, np.array([4 - 1])).token_ids == [(8,)]


@pytest.mark.parametrize("drafted", [True, False])
def test_a_token_that_resets_top_p_counts_at_once(drafted: bool) -> None:
    """The nucleus has one token after a decay, and all tokens before the first decay and after a reset."""
    rows = torch.zeros(2, 100)
    rows[0, 2] = 9.0
    tokens = set()
    for seed in range(20):
        request = make_request(
            [0], top_p=1.0, top_p_decay=0.001, top_p_min=0.0, top_p_reset_id=2, random_seed=seed
        )
        sampler = make_sampler(1, 100)
        row = Row(request, generated=(1,) * 10, drafts=(2,) if drafted else ())
        new = list(decode_rows(rows[: 1 + drafted].clone(), [row], sampler).token_ids[0])
        if not drafted:
            batch = ScheduledBatch(0, generation_slots=(0,))
            sampler.apply(batch)
            sampler.apply_drafts(batch)
            new += sampler.decode(batch, rows[1:].clone(), np.array([12])).token_ids[0]
        assert new[0] == 2
        tokens.add(new[1])
    assert len(tokens) > 10


def test_a_row_after_a_rejected_draft_does_not_reset_top_p() -> None:
    """The row's token is dropped with the draft, even if it is the one that resets top_p."""
    tokens = set()
    for seed in range(20):
        request = make_request(
            [0], top_p=1.0, top_p_decay=0.001, top_p_min=0.0, top_p_reset_id=2, random_seed=seed
        )
        sampler = make_sampler(1, 100)
        row = Row(request, generated=(1,) * 10, drafts=(3,))
        assert decode_rows(_logits(4, 2, vocab_size=100), [row], sampler).token_ids == [(4,)]
        batch = ScheduledBatch(0, generation_slots=(0,))
        sampler.apply(batch)
        sampler.apply_drafts(batch)
        tokens.update(sampler.decode(batch, torch.zeros(1, 100), np.array([12])).token_ids[0])
    assert tokens == {0}
