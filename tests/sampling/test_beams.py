"""Candidates of beam searches compared with the reference, and state that moves between beams."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import OutputOptions, Request
from inflight.core.schedule.batch import BeamGroup, BeamMove, ContextChunk, ScheduledBatch, SlotStart
from inflight.sampling import reference
from tests.sampling.factories import Row, beams_of, make_request, make_sampler, start_batch
from tests.sampling.margins import is_apart
from tests.sampling.strategies import logits_rows, requests
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("row_kernels")


@given(st.data())
@settings(max_examples=examples(fast=40, all=200), deadline=None, derandomize=True)
def test_candidates_are_those_of_the_reference(data: st.DataObject) -> None:
    vocab_size, width = data.draw(st.sampled_from([4, 20])), data.draw(st.integers(1, 4))
    request = data.draw(requests(vocab_size, beam_width=max(2, width)))
    rows = data.draw(logits_rows(width, vocab_size))
    token = st.integers(0, vocab_size - 1)
    length = data.draw(st.integers(0, 4))
    beams = data.draw(
        st.lists(st.lists(token, min_size=length, max_size=length), min_size=width, max_size=width)
    )
    tokens = [[*request.input_token_ids, *beam] for beam in beams]
    scores = data.draw(
        st.lists(
            st.sampled_from([-4.0, -1.0, -0.5]) | st.floats(-9, 0, width=32), min_size=width, max_size=width
        )
    )
    count = data.draw(st.integers(1, width * vocab_size))

    got = beams_of(torch.tensor(rows), request, tokens, scores, count)

    _check_candidates(
        got, reference.beam_candidates(rows, request, tokens, scores, count + 1), count, request
    )
    _check_details(got, rows, request)


def _check_candidates(
    got: BeamCandidates, expected: list[tuple[int, int, float]], count: int, request: Request
) -> None:
    assert len(got.rows) == len(got.token_ids) == len(got.scores) == count
    rate = request.sampling.beam_search_diversity_rate
    ranks = [score + rate * row for row, _, score in expected]
    got_ranks = [score + rate * row for row, score in zip(got.rows, got.scores, strict=True)]
    assert got_ranks == pytest.approx(ranks[:count], abs=1e-3, rel=1e-5)
    for index, ((row, token, score), (rank, after)) in enumerate(
        zip(expected[:count], pairwise([*ranks, -1e9]))
    ):
        if not is_apart(rank, after) or rank == after:
            return  # rounding may have turned this and the next
        assert (got.rows[index], got.token_ids[index]) == (row, token)
        assert got.scores[index] == pytest.approx(score, abs=1e-3, rel=1e-5)


def _check_details(got: BeamCandidates, rows: list[list[float]], request: Request) -> None:
    wanted = request.output
    log_probs = [reference.log_probs(row) for row in rows]
    if wanted.return_log_probs:
        expected = [log_probs[row][token] for row, token in zip(got.rows, got.token_ids, strict=True)]
        assert got.log_probs == pytest.approx(expected, abs=1e-5)
    else:
        assert got.log_probs == ()
    count = min(wanted.num_top_log_probs, len(rows[0]))
    assert [top.token_ids for top in got.top_log_probs] == [
        tuple(token for token, _ in reference.top_log_probs(row, count)) for row in rows if count
    ]
    logits = [np.frombuffer(data, dtype=np.float32).tolist() for data in got.logits]
    assert logits == (rows if wanted.return_generation_logits else [])


def test_scores_are_added_as_transformers_adds_them() -> None:
    """Scores are bitwise transformers': float32 log_softmax plus the score in float32, then top-k over all
    beams."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 3
    scores = torch.tensor([-1.25, -2.5, -3.3, -9.1])
    request = make_request(beam_width=4)
    got = beams_of(logits.clone(), request, [[0, index] for index in range(4)], scores.tolist(), 8)
    best, where = (logits.log_softmax(-1) + scores[:, None]).view(-1).topk(8)
    assert got.scores == tuple(best.tolist())
    assert got.rows == tuple((where // 1000).tolist()) and got.token_ids == tuple((where % 1000).tolist())


def test_equal_ranks_are_ordered_by_row_then_token() -> None:
    got = beams_of(torch.zeros(3, 4), make_request(beam_width=3), [[0, 1]] * 3, [-1.0, -1.0, -1.0], 6)
    assert got.rows == (0, 0, 0, 0, 1, 1)
    assert got.token_ids == (0, 1, 2, 3, 0, 1)


def test_diversity_changes_ranks_and_not_scores() -> None:
    request = make_request(beam_width=2, beam_search_diversity_rate=1.0)
    got = beams_of(torch.zeros(2, 4), request, [[0, 1]] * 2, [-1.0, -1.5], 5)
    assert got.rows == (1, 1, 1, 1, 0)
    assert got.scores == pytest.approx([-1.5 - np.log(4)] * 4 + [-1.0 - np.log(4)], abs=1e-6)


def test_banned_tokens_are_never_candidates() -> None:
    request = make_request(beam_width=2, bad_words=[(token,) for token in range(4)])
    got = beams_of(torch.randn(2, 4), request, [[0, 1]] * 2, [-1.0, -1.5], 8)
    assert set(got.scores) == {-np.inf}
    assert got.rows == (0, 0, 0, 0, 1, 1, 1, 1) and got.token_ids == (0, 1, 2, 3, 0, 1, 2, 3)


def test_searches_of_different_widths_and_other_rows_share_a_batch() -> None:
    vocab_size = 30
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(3))
    narrow = make_request([3], beam_width=2, repetition_penalty=2.0)
    wide = make_request([4, 5], beam_width=4, output=OutputOptions(return_log_probs=True))
    rows = [
        Row(narrow, (7,)),
        Row(make_request([6], top_k=3, random_seed=1)),
        Row(wide, (1,)),
        Row(wide, (2,)),
        Row(narrow, (8,)),
        Row(wide, (3,)),
        Row(make_request([6])),
        Row(wide, (9,)),
    ]
    batch, positions = start_batch(rows)
    groups = (BeamGroup((4, 0), (-1.0, -2.0), 4), BeamGroup((2, 3, 5, 7), (-1.0, -1.1, -1.2, -1.3), 8))
    batch = ScheduledBatch(
        0, starts=batch.starts, generation_slots=batch.generation_slots, beam_groups=groups
    )
    sampler = make_sampler(8, vocab_size)
    sampler.apply(batch)
    output = sampler.decode(batch, logits.clone(), positions)

    assert [len(tokens) for tokens in output.token_ids] == [0, 1, 0, 0, 0, 0, 1, 0]
    for group, request, got in zip(groups, (narrow, wide), output.beams, strict=True):
        found = reference.beam_candidates(
            logits[list(group.slots)].tolist(),
            request,
            [rows[slot].tokens for slot in group.slots],
            group.scores,
            group.num_candidates,
        )
        assert list(zip(got.rows, got.token_ids)) == [(row, token) for row, token, _ in found]
    for slot in (1, 6):
        expected = reference.next_token(logits[slot].tolist(), rows[slot].request, rows[slot].tokens)
        assert output.token_ids[slot] == (expected,)


def test_beams_move_all_at_once() -> None:
    """Two beams swap places and a third is a copy; penalties count exactly the tokens of each."""
    vocab_size, prompt = 20, (1, 2)
    request = make_request(prompt, beam_width=3, presence_penalty=3.0, no_repeat_ngram_size=2)
    sampler = make_sampler(4, vocab_size)
    slots = (3, 0, 2)
    context = ScheduledBatch(
        0,
        starts=(SlotStart(3, request, 0, prompt),),
        context=(ContextChunk(3, 0, prompt, True),),
        beam_groups=(BeamGroup((3,), (0.0,), 6),),
    )
    sampler.apply(context)
    sampler.decode(context, torch.randn(1, vocab_size), np.array([2]))
    sequences = {3: list(prompt)}
    steps = [
        [(3, 3, 5), (0, 3, 6), (2, 3, 7)],
        [(3, 0, 8), (0, 3, 9), (2, 2, 2)],
        [(3, 2, 1), (0, 2, 4), (2, 0, 5)],
    ]
    for step, moves in enumerate(steps):
        sequences = {slot: [*sequences[parent], token] for slot, parent, token in moves}
        group = BeamGroup(slots, (-1.0, -2.0, -3.0), 60)
        batch = ScheduledBatch(
            step + 1,
            moves=tuple(BeamMove(*move) for move in moves),
            generation_slots=(0, 2, 3),
            beam_groups=(group,),
        )
        sampler.apply(batch)
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(step))
        got = sampler.decode(batch, logits.clone(), np.full(3, 3 + step)).beams[0]
        rows = dict(zip((0, 2, 3), logits.tolist()))
        found = reference.beam_candidates(
            [rows[slot] for slot in slots], request, [sequences[slot] for slot in slots], group.scores, 60
        )
        assert list(zip(got.rows, got.token_ids)) == [(row, token) for row, token, _ in found]
