"""Decisions of a beam search, step by step, for given candidates."""

from __future__ import annotations

import pytest

from inflight.core.request.beam_search import BeamCandidates, BeamSearch, Hypothesis
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason

from .factories import make_request

END = 99


_OF_REQUESTS = ("end_ids", "stop_words", "stop_words_after")


def make_search(beam_width: int = 2, new: int = 10, **fields) -> BeamSearch:
    request_fields = {name: fields.pop(name) for name in _OF_REQUESTS if name in fields}
    request: Request = make_request(
        new=new,
        sampling=SamplingConfig(beam_width=beam_width, **fields),
        **{"end_ids": (END,), **request_fields},
    )
    return BeamSearch(request)


def make_candidates(*candidates: tuple[int, int, float], **fields) -> BeamCandidates:
    """Make candidates from tuples (row, token, score), best first."""
    rows, tokens, scores = zip(*candidates)
    return BeamCandidates(rows, tokens, scores, **fields)


def tokens_of(hypotheses: list[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.token_ids for hypothesis in hypotheses]


def reasons_of(hypotheses: list[Hypothesis]) -> list[FinishReason]:
    return [hypothesis.finish_reason for hypothesis in hypotheses]


@pytest.mark.parametrize(("end_ids", "expected"), [((), 6), ((1,), 6), ((1, 2), 9), ((1, 2, 3), 12)])
def test_more_end_ids_need_more_candidates(end_ids, expected):
    assert make_search(3, end_ids=end_ids).num_candidates == expected


def test_stop_words_do_not_need_more_candidates():
    assert make_search(3, stop_words=((1,), (2,), (3,))).num_candidates == 6


def test_a_search_has_one_row_until_its_first_step_then_one_per_beam():
    search = make_search(2)
    assert (search.num_rows, search.scores, search.parents) == (1, (0.0,), ())
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    assert (search.num_rows, search.scores) == (2, (-1.0, -2.0))
    assert (search.parents, search.token_ids) == ((0, 0), (5, 6))
    search.advance(make_candidates((1, 7, -2.5), (1, 8, -2.6), (0, 7, -3.0), (0, 9, -4.0)))
    assert (search.parents, search.token_ids) == ((1, 1), (7, 8))
    assert [search.row_tokens(row) for row in range(2)] == [(6, 7), (6, 8)]
    assert not search.done


def test_before_the_first_step_every_beam_is_empty():
    empty = Hypothesis((), 0.0, 0.0, FinishReason.NOT_FINISHED)
    assert make_search(beam_width=3).hypotheses() == [empty] * 3


def test_only_the_first_candidates_may_finish():
    """A later candidate with an end id neither finishes nor continues."""
    search = make_search(2, early_stopping=1)
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, END, -3.0), (0, 8, -4.0)))
    search.advance(make_candidates((0, 5, -2.0), (1, END, -2.5), (0, END, -3.0), (1, 6, -4.0)))
    assert (search.parents, search.token_ids) == ((0, 1), (5, 6))
    assert tokens_of(search.hypotheses()) == [(5, 5), (6,)]
    assert reasons_of(search.hypotheses()) == [FinishReason.NOT_FINISHED, FinishReason.END_ID]
    assert not search.done, "one beam has finished, not two"


def test_the_end_id_counts_in_the_score_and_is_not_returned():
    search = make_search(2, length_penalty=1.0, early_stopping=1)
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    search.advance(make_candidates((0, END, -3.0), (1, END, -5.0), (0, 7, -6.0), (0, 8, -7.0)))
    assert search.done
    assert tokens_of(search.hypotheses()) == [(5,), (6,)]
    assert [hypothesis.score for hypothesis in search.hypotheses()] == [-1.5, -2.5]


def test_at_the_length_limit_candidates_keep_their_finish_reasons():
    search = make_search(3, new=2, stop_words=((5, 7),))
    search.advance(make_candidates(*((0, token, -float(token)) for token in (5, 6, 7, 8, 9, 10))))
    search.advance(
        make_candidates(
            (0, 7, -5.0), (0, END, -5.5), (1, 8, -6.0), (1, 9, -6.1), (1, END, -6.2), (2, 5, -7.0)
        )
    )
    assert search.done
    assert tokens_of(search.hypotheses()) == [(5, 7), (5,), (6, 8)]
    assert reasons_of(search.hypotheses()) == [
        FinishReason.STOP_WORDS,
        FinishReason.END_ID,
        FinishReason.LENGTH,
    ]


@pytest.mark.parametrize("token", [END, 7])
def test_a_search_for_one_token_ends_after_its_first_step(token):
    search = make_search(2, new=1)
    search.advance(make_candidates((0, token, -1.0), (0, 6, -2.0), (0, 5, -3.0), (0, 8, -4.0)))
    assert search.done
    assert tokens_of(search.hypotheses()) == [() if token == END else (7,), (6,)]


# ---------------------------------------------------------------- stop words


def test_a_stop_word_finishes_a_beam_that_generated_all_of_it_and_is_returned():
    search = make_search(2, stop_words=((5, 7),))
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    search.advance(make_candidates((0, 7, -1.5), (1, 7, -2.5), (0, 8, -3.0), (1, 8, -4.0)))
    assert (search.parents, search.token_ids) == ((1, 0), (7, 8))
    best = search.hypotheses()[0]
    assert (best.token_ids, best.finish_reason) == ((5, 7), FinishReason.STOP_WORDS)


def test_a_stop_word_ends_no_beam_before_min_tokens():
    search = make_search(2, stop_words=((5,),), stop_words_after=1)
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    assert search.token_ids == (5, 6)
    search.advance(make_candidates((0, 5, -1.5), (1, 7, -2.5), (0, 8, -3.0), (1, 8, -4.0)))
    assert (search.parents, search.token_ids) == ((1, 0), (7, 8))
    best = search.hypotheses()[0]
    assert (best.token_ids, best.finish_reason) == ((5, 5), FinishReason.STOP_WORDS)


def test_a_stop_word_never_begins_in_the_prompt():
    search = make_search(2, stop_words=((13, 5),))  # the prompt is 10, 11, 12, 13
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    assert search.token_ids == (5, 6)


def test_a_row_without_a_continuing_beam_is_a_filler_and_no_hypothesis():
    words = ((5,), (6,), (7,))
    search = make_search(2, stop_words=words, length_penalty=1.0, early_stopping=2)
    search.advance(make_candidates((0, 5, -1.0), (0, 8, -2.0), (0, 6, -3.0), (0, 7, -4.0)))
    assert (search.parents, search.token_ids, search.num_rows) == ((0, 0), (8, 8), 2)
    assert search.scores == (-2.0, -1e9)
    assert tokens_of(search.hypotheses()) == [(5,), (8,)], "a row that only fills is no hypothesis"
    search.advance(make_candidates((0, 1, -2.5), (0, 2, -2.6), (0, 3, -2.7), (0, 4, -2.8)))
    assert (search.parents, search.token_ids, search.scores) == ((0, 0), (1, 2), (-2.5, -2.6))


def test_a_search_ends_when_no_beam_can_continue():
    search = make_search(2, stop_words=((5,), (6,), (7,), (8,)))
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    assert search.done and search.parents == ()
    assert tokens_of(search.hypotheses()) == [(5,), (6,)]


# ---------------------------------------------------------------- when it ends


def finished_twice(**fields) -> BeamSearch:
    """A search with two finished beams of -2.0 and -3.0 after two steps, and a running one of -3.2."""
    search = make_search(2, **fields)
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -1.5), (0, 7, -3.0), (0, 8, -4.0)))
    search.advance(make_candidates((0, END, -2.0), (1, END, -3.0), (0, 7, -3.2), (0, 8, -4.0)))
    return search


def test_early_stopping_1_ends_with_enough_finished_beams():
    search = make_search(2, early_stopping=1)
    search.advance(make_candidates((0, END, -5.0), (0, 6, -5.5), (0, 7, -6.0), (0, 8, -6.5)))
    assert not search.done
    search.advance(make_candidates((0, END, -6.0), (0, 6, -6.0), (1, 7, -7.0), (1, 8, -8.0)))
    assert search.done


def test_early_stopping_0_compares_with_the_current_length():
    assert finished_twice().done  # -3.2 is no better than -3.0, and scores only fall
    assert finished_twice(length_penalty=1.0).done  # -1.6 is no better than -1.5


def test_other_early_stopping_compares_with_the_longest_length():
    assert not finished_twice(length_penalty=1.0, early_stopping=2).done  # a beam may reach -0.32
    assert not finished_twice(length_penalty=1.0, early_stopping=2, new=3).done  # it may reach -1.07
    assert finished_twice(early_stopping=2).done, "without a length penalty no length helps"


@pytest.mark.parametrize("length_penalty", [1e4, 3e38])
def test_an_overflowing_length_penalty_is_no_error(length_penalty):
    """All scores are 0, so no finished beam is replaced."""
    search = finished_twice(length_penalty=length_penalty)
    assert search.done
    assert tokens_of(search.hypotheses()) == [(5,), (6,)]


def test_an_equal_score_does_not_replace_a_finished_beam():
    search = make_search(2)
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -1.5), (0, 7, -3.0), (0, 8, -4.0)))
    search.advance(make_candidates((0, END, -2.0), (1, END, -3.0), (0, 7, -3.0), (0, 8, -4.0)))
    assert search.done


def test_a_better_beam_takes_the_place_of_the_worst_finished_one():
    search = finished_twice(length_penalty=1.0, early_stopping=2, new=4)
    search.advance(make_candidates((0, END, -3.3), (1, 8, -5.2), (0, 7, -5.3), (0, 8, -5.4)))
    best = search.hypotheses()
    assert tokens_of(best) == [(5,), (5, 7)]
    assert [hypothesis.score for hypothesis in best] == pytest.approx([-1.0, -1.1])
    assert search.done, "-1.3 is possible: worse than -1.1, if better than the -1.5 that was displaced"


def test_equal_scores_are_ordered_by_the_time_of_finishing():
    search = make_search(2)
    search.advance(make_candidates((0, END, -2.0), (0, 6, -2.0), (0, 7, -2.0), (0, 8, -4.0)))
    assert tokens_of(search.hypotheses()) == [(), (6,)]
    search.advance(make_candidates((0, END, -2.0), (1, 7, -2.5), (0, 8, -2.6), (0, 9, -3.0)))
    assert tokens_of(search.hypotheses()) == [(), (6,)]
    assert search.done


# ---------------------------------------------------------------- results


def test_the_requested_number_of_hypotheses_is_available_at_every_step():
    search = make_search(3, num_return_sequences=2)
    assert tokens_of(search.hypotheses()) == [(), ()]
    search.advance(make_candidates(*((0, token, -float(token)) for token in (5, 6, 7, 8, 9, 10))))
    assert tokens_of(search.hypotheses()) == [(5,), (6,)]


def test_details_follow_each_beam_and_leave_the_end_id_out():
    def tops(row: int) -> TopLogProbs:
        return TopLogProbs((row,), (-0.5 - row,))

    search = make_search(2, early_stopping=1)
    first = make_candidates(
        (0, 5, -1.0),
        (0, 6, -2.0),
        (0, 7, -3.0),
        (0, 8, -4.0),
        log_probs=(-0.1, -0.2, -0.3, -0.4),
        top_log_probs=(tops(7),),
        logits=(b"0",),
    )
    search.advance(first)
    second = make_candidates(
        (1, END, -2.5),
        (0, 9, -3.0),
        (1, 7, -3.1),
        (0, 7, -3.2),
        log_probs=(-0.5, -0.6, -0.7, -0.8),
        top_log_probs=(tops(0), tops(1)),
        logits=(b"1", b"2"),
    )
    search.advance(second)
    ended, running = search.hypotheses()
    assert (ended.token_ids, ended.log_probs, ended.cum_log_prob) == ((6,), (-0.2,), -2.5)
    assert (ended.top_log_probs, ended.logits) == ((tops(7),), (b"0",))
    assert (running.token_ids, running.log_probs) == ((5, 9), (-0.1, -0.6))
    assert (running.top_log_probs, running.logits) == ((tops(7), tops(0)), (b"0", b"1"))
    assert running.cum_log_prob == -3.0


def test_details_that_are_not_requested_are_empty():
    search = make_search(2, new=1)
    search.advance(make_candidates((0, 7, -1.0), (0, 6, -2.0), (0, 5, -3.0), (0, 8, -4.0)))
    assert search.hypotheses()[0] == Hypothesis((7,), -1.0, -1.0, FinishReason.LENGTH)


def test_beams_continue_in_the_order_of_the_candidates():
    """With a diversity rate a candidate of a lower score may rank higher."""
    search = make_search(2)
    search.advance(make_candidates((0, 5, -2.0), (0, 6, -1.0), (0, 7, -1.5), (0, 8, -4.0)))
    assert (search.token_ids, search.scores) == ((5, 6), (-2.0, -1.0))
    assert tokens_of(search.hypotheses()) == [(6,), (5,)]


# ---------------------------------------------------------------- bans


def test_banned_tokens_are_never_returned():
    impossible = -float("inf")
    search = make_search(2, early_stopping=1, new=2)
    search.advance(
        make_candidates((0, 5, -1.0), (0, 6, impossible), (0, END, impossible), (0, 8, impossible))
    )
    assert not search.done and search.token_ids == (5, 6)
    assert tokens_of(search.hypotheses()) == [(5,), ()]
    search.advance(make_candidates((0, 9, -2.0), (0, 6, impossible), (1, 7, impossible), (1, 8, impossible)))
    assert search.done
    assert tokens_of(search.hypotheses()) == [(5, 9), ()]


def test_a_search_without_allowed_tokens_ends():
    impossible = -float("inf")
    search = make_search(2)
    search.advance(
        make_candidates((0, END, -1.0), (0, 6, impossible), (0, 5, impossible), (0, 8, impossible))
    )
    assert search.done
    assert tokens_of(search.hypotheses()) == [(), ()]
    assert reasons_of(search.hypotheses()) == [FinishReason.END_ID, FinishReason.LENGTH]


def test_the_cost_of_a_search_is_linear_in_its_steps():
    """Beams are linked, not copied, and neither walking nor freeing them recurses."""
    length = 50_000
    search = make_search(2, new=length)
    step = make_candidates((0, 5, -1.0), (1, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0))
    search.advance(make_candidates((0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0)))
    while not search.done:
        search.advance(step)
    assert search.hypotheses()[0].token_ids == (5,) * length
