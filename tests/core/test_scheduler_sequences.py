"""Beams, several sequences and drafts: exact batches for given outputs of the device."""

from __future__ import annotations

from array import array

import pytest

from inflight.config import CapacityPolicy
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import ExternalDraft, IterationInput, OutputOptions
from inflight.core.request.response import Response, TopLogProbs
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.schedule.batch import BeamGroup, BeamMove, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InvalidArgument, StepFailed
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler, with_table

TWO_BEAMS = SamplingConfig(beam_width=2)


def make_candidates(*candidates: tuple[int, int, float], **fields) -> BeamCandidates:
    """Make candidates from tuples (row, token, score), best first."""
    rows, tokens, scores = zip(*candidates)
    return BeamCandidates(rows, tokens, scores, **fields)


def update(scheduler: Scheduler, batch: ScheduledBatch, *tokens: tuple[int, ...], **output) -> list[Response]:
    responses = scheduler.update(batch, ModelOutput(batch.iteration, list(tokens), **output))
    check_integrity(scheduler)
    return responses


# ---------------------------------------------------------------- beams


def start_beams(prompt: int = 6, new: int = 3, **fields) -> tuple[Scheduler, list[Response]]:
    """A search of two beams after its context, whose best continuations are tokens 7 and 8."""
    scheduler = make_scheduler(**fields.pop("limits", {}))
    Driver(scheduler).accept(make_request(prompt=prompt, new=new, sampling=TWO_BEAMS, **fields))
    batch = scheduler.schedule()
    assert batch.beam_groups == (BeamGroup((0,), (0.0,), 4),)
    best = make_candidates((0, 7, -1.0), (0, 8, -2.0), (0, 9, -3.0), (0, 5, -4.0))
    return scheduler, update(scheduler, batch, (), beams=[best])


def test_beams_share_the_contexts_blocks_except_the_last_which_is_copied():
    scheduler, _ = start_beams(prompt=6)
    batch = scheduler.schedule()
    assert batch.moves == (BeamMove(0, 0, 7), BeamMove(1, 0, 8))
    assert batch.block_copies == ((1, 2),) and batch.replaced_blocks == ((0, 1, 2),)
    assert batch.new_blocks == () and batch.generation_slots == (0, 1)
    assert batch.beam_groups == (BeamGroup((0, 1), (-1.0, -2.0), 4),)


def test_a_dropped_beam_is_replaced_by_the_other():
    scheduler, _ = start_beams(prompt=8)
    batch = scheduler.schedule()
    assert batch.new_blocks == ((0, (2,)), (1, (3,))) and batch.block_copies == ()
    best = make_candidates((1, 4, -2.5), (1, 5, -2.6), (0, 6, -2.7), (0, 7, -2.8))
    update(scheduler, batch, (), (), beams=[best])
    assert scheduler.kv_cache.pool.num_held == 3
    batch = scheduler.schedule()
    assert batch.moves == (BeamMove(0, 1, 4), BeamMove(1, 1, 5))
    assert [source for source, _ in batch.block_copies] == [3]


def test_the_best_beams_are_returned_in_order_with_the_prompt():
    scheduler, _ = start_beams(prompt=3, new=2)
    best = make_candidates((1, 4, -2.5), (0, 5, -2.6), (0, 6, -2.7), (0, 7, -2.8))
    (final,) = update(scheduler, scheduler.schedule(), (), (), beams=[best])
    assert final.is_final and final.result.is_sequence_final
    assert final.result.output_token_ids == ((10, 11, 12, 8, 4), (10, 11, 12, 7, 5))
    assert final.result.num_output_tokens == (2, 2)
    assert final.result.finish_reasons == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert scheduler.kv_cache.pool.num_held == 0 and scheduler.kv_cache.num_reserved == 0


def test_each_response_of_streamed_beams_has_all_tokens_so_far():
    scheduler, (first,) = start_beams(prompt=3, new=2, streaming=True)
    assert first.result.is_cumulative and first.result.output_token_ids == ((7,), (8,))
    best = make_candidates((1, 4, -2.5), (0, 5, -2.6), (0, 6, -2.7), (0, 7, -2.8))
    (final,) = update(scheduler, scheduler.schedule(), (), (), beams=[best])
    assert final.is_final and final.result.output_token_ids == ((8, 4), (7, 5))


def test_details_of_beams_follow_their_tokens():
    output = OutputOptions(return_log_probs=True, num_top_log_probs=1, return_generation_logits=True)
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(prompt=3, new=2, sampling=TWO_BEAMS, output=output))

    def tops(*tokens: int) -> tuple[TopLogProbs, ...]:
        return tuple(TopLogProbs((token,), (-0.5,)) for token in tokens)

    def logits(*values: float) -> tuple[bytes, ...]:
        return tuple(array("f", [value]).tobytes() for value in values)

    first = make_candidates(
        (0, 7, -1.0), (0, 8, -2.0), log_probs=(-1.5, -2.5), top_log_probs=tops(7), logits=logits(1.0)
    )
    update(scheduler, scheduler.schedule(), (), beams=[first])
    second = make_candidates(
        (1, 4, -2.5),
        (0, 5, -2.6),
        log_probs=(-0.25, -0.75),
        top_log_probs=tops(5, 4),
        logits=logits(2.0, 3.0),
    )
    (final,) = update(scheduler, scheduler.schedule(), (), (), beams=[second])
    assert final.result.log_probs == ((-2.5, -0.25), (-1.5, -0.75))
    assert final.result.cum_log_probs == (-2.5, -2.6)
    assert final.result.top_log_probs == (tops(7, 4), tops(7, 5))
    assert [tensor.data for tensor in final.result.generation_logits] == [
        b"".join(logits(1.0, 3.0)),
        b"".join(logits(1.0, 2.0)),
    ]


def test_searches_of_different_widths_and_samples_run_in_one_batch():
    scheduler = make_scheduler(max_num_sequences=8)
    Driver(scheduler).accept(
        make_request(1, new=9, sampling=SamplingConfig(beam_width=3)),
        make_request(2, new=9),
        make_request(3, new=9, sampling=TWO_BEAMS),
    )
    batch = scheduler.schedule()
    assert [(group.slots, group.num_candidates) for group in batch.beam_groups] == [((0,), 6), ((4,), 4)]
    wide = make_candidates((0, 1, -1.0), (0, 2, -2.0), (0, 3, -3.0))
    narrow = make_candidates((0, 1, -1.0), (0, 2, -2.0))
    update(scheduler, batch, (), (5,), (), beams=[wide, narrow])
    batch = scheduler.schedule()
    assert batch.generation_slots == (0, 1, 2, 3, 4, 5)
    assert [group.slots for group in batch.beam_groups] == [(0, 1, 2), (4, 5)]
    stats = scheduler.stats(batch)
    assert (stats.num_scheduled_requests, stats.num_generation_requests) == (3, 3)


def test_a_search_waits_for_as_many_slots_as_it_has_beams():
    scheduler = make_scheduler(max_num_sequences=2)
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=2), make_request(2, new=2, sampling=TWO_BEAMS))
    batch, _ = driver.step()
    assert [start.request.request_id for start in batch.starts] == [1]
    driver.step()
    assert [start.request.request_id for start in scheduler.schedule().starts] == [2]


def test_a_search_reserves_for_its_worst_case_under_either_policy():
    for policy in CapacityPolicy:
        scheduler = make_scheduler(policy, num_blocks=16)
        Driver(scheduler).accept(make_request(prompt=6, new=8, sampling=TWO_BEAMS))  # 13 tokens: 1 + 2 * 3
        scheduler.schedule()
        assert scheduler.kv_cache.num_unreserved == 16 - 7


def test_rows_of_a_search_wait_for_the_outcome_of_rows_in_flight():
    scheduler, _ = start_beams()
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None


def test_a_cancelled_search_returns_its_unfinished_beams():
    scheduler, _ = start_beams()
    (final,) = Driver(scheduler).accept(stop=(1,))
    assert final.is_final and final.result.num_output_tokens == (1, 1)
    assert [ids[-1] for ids in final.result.output_token_ids] == [7, 8]
    assert final.result.finish_reasons == (FinishReason.CANCELLED,) * 2
    assert scheduler.kv_cache.pool.num_held == 0 and scheduler.kv_cache.num_reserved == 0


def test_more_beams_than_slots_are_refused():
    driver = Driver(make_scheduler(max_num_sequences=2))
    (refused,) = driver.accept(make_request(sampling=SamplingConfig(beam_width=3)))
    assert isinstance(refused.error, InvalidArgument) and "at most 2" in str(refused.error)


# ---------------------------------------------------------------- several sequences


def make_sequences(count: int = 3, **fields):
    sampling = SamplingConfig(top_k=5, num_return_sequences=count)
    return make_request(sampling=sampling, **fields)


def test_siblings_start_when_the_prompt_is_computed_and_share_it():
    for reuse in (True, False):
        scheduler = make_scheduler(reuse=reuse)
        driver = Driver(scheduler)
        driver.accept(make_sequences(prompt=10, new=3), make_request(2, prompt=1, new=3))
        batch, _ = driver.step()
        assert [(start.request.request_id, start.sequence_index) for start in batch.starts] == [
            (1, 0),
            (2, 0),
        ]
        batch, _ = driver.step()
        assert [start.sequence_index for start in batch.starts] == [1, 2]
        assert batch.new_blocks[:2] == ((2, (0, 1)), (3, (0, 1)))
        assert [(chunk.start, chunk.token_ids) for chunk in batch.context] == [(8, (18, 19)), (8, (18, 19))]


def test_without_reuse_other_requests_do_not_see_a_prompt_that_siblings_share():
    driver = Driver(make_scheduler(reuse=False))
    driver.accept(make_sequences(prompt=10, new=3))
    driver.step()
    driver.accept(make_request(2, prompt=10))
    batch, _ = driver.step()
    assert batch.context[-1].start == 0


def test_every_sequence_has_a_last_response_and_one_of_them_is_final():
    driver = Driver(make_scheduler())
    driver.accept(make_sequences(2, new=2))
    responses = [response for _ in range(4) for response in driver.step()[1]]
    assert [(r.result.sequence_index, r.result.is_sequence_final, r.is_final) for r in responses] == [
        (0, True, False),
        (1, True, True),
    ]
    assert driver.scheduler.num_active == 0


def test_a_stop_ends_all_sequences_started_or_not():
    for steps in (0, 1, 2):
        scheduler = make_scheduler()
        driver = Driver(scheduler)
        driver.accept(make_sequences(3, new=9))
        for _ in range(steps):
            driver.step()
        responses = driver.accept(stop=(1,))
        assert [response.is_final for response in responses] == [False, False, True]
        assert scheduler.num_active == scheduler.kv_cache.pool.num_held == 0
        check_integrity(scheduler)


def test_one_sequence_can_be_stopped_and_the_others_go_on():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_sequences(2, new=3))
    driver.step()
    driver.step()
    stop = StopSignal(1, StopReason.STOP_WORDS, sequence_index=0)
    (stopped,) = scheduler.accept(IterationInput(9, 0, stops=(stop,)))
    assert stopped.result.finish_reasons == (FinishReason.STOP_WORDS,)
    assert stopped.result.is_sequence_final and not stopped.is_final
    driver.step()
    _, (final,) = driver.step()
    assert (final.result.sequence_index, final.is_final) == (1, True)
    assert final.result.finish_reasons == (FinishReason.LENGTH,)


def test_a_failure_of_one_sequence_is_the_one_final_error_of_the_request():
    scheduler = make_scheduler(max_num_sequences=2)
    driver = Driver(scheduler)
    driver.accept(make_sequences(3, new=9))
    driver.step()
    (failed,) = scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    assert failed.is_final and str(failed.error) == "boom"
    assert scheduler.num_active == scheduler.kv_cache.pool.num_held == 0
    check_integrity(scheduler)


# ---------------------------------------------------------------- drafts


def make_drafted(*draft: int, **fields):
    return make_request(draft=ExternalDraft(draft), **fields)


def test_a_draft_follows_the_context_and_accepted_tokens_count():
    scheduler = make_scheduler()
    output = OutputOptions(return_perf_metrics=True, exclude_input_from_output=True)
    Driver(scheduler).accept(make_drafted(5, 6, 7, prompt=3, new=6, output=output))
    batch = scheduler.schedule()
    (chunk,) = batch.context
    assert (chunk.token_ids, chunk.num_draft_tokens, chunk.is_last) == ((10, 11, 12, 5, 6, 7), 3, True)
    assert update(scheduler, batch, (5, 6, 9)) == []
    batch = scheduler.schedule()
    assert batch.generation_slots == (0,) and batch.context == ()
    update(scheduler, batch, (1,))
    update(scheduler, scheduler.schedule(), (2,))
    (final,) = update(scheduler, scheduler.schedule(), (3,))
    assert final.result.output_token_ids == ((5, 6, 9, 1, 2, 3),)
    metrics = final.result.perf_metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 2)


@pytest.mark.parametrize("accepted", [(), (5,), (5, 6, 7)])
def test_a_sequence_may_be_set_to_end_when_its_draft_is_verified(accepted):
    scheduler = make_scheduler()
    Driver(scheduler).accept(
        make_request(prompt=3, new=9, draft=ExternalDraft((5, 6, 7), ends_sequence=True))
    )
    (final,) = update(scheduler, scheduler.schedule(), (*accepted, 9))
    assert final.is_final and final.result.finish_reasons == (FinishReason.LENGTH,)
    assert final.result.output_token_ids[0][3:] == (*accepted, 9)
    assert scheduler.num_active == 0
    check_integrity(scheduler)


def test_a_sequence_that_ends_with_its_draft_may_end_earlier_at_an_end_id():
    scheduler = make_scheduler()
    draft = ExternalDraft((5, 6, 7), ends_sequence=True)
    Driver(scheduler).accept(make_request(prompt=3, new=9, end_ids=(6,), draft=draft))
    (final,) = update(scheduler, scheduler.schedule(), (5, 6, 8))
    assert final.result.finish_reasons == (FinishReason.END_ID,)
    assert final.result.output_token_ids[0][3:] == (5,)


def test_a_sequence_with_a_draft_in_flight_is_not_scheduled():
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_drafted(5, 6, new=6))
    assert scheduler.schedule() is not None and scheduler.schedule() is None


def test_accepted_tokens_stop_at_an_end_id_and_at_the_length_limit():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    output = OutputOptions(return_perf_metrics=True)
    driver.accept(
        make_drafted(5, 6, 7, prompt=3, new=9, end_ids=(6,), output=output),
        make_drafted(5, 6, request_id=2, prompt=3, new=3, output=output),
    )
    first, second = update(scheduler, scheduler.schedule(), (5, 6, 7, 8), (5, 6, 4))
    assert first.result.output_token_ids == ((10, 11, 12, 5),)
    assert first.result.finish_reasons == (FinishReason.END_ID,)
    assert second.result.output_token_ids == ((10, 11, 12, 5, 6, 4),)
    assert second.result.finish_reasons == (FinishReason.LENGTH,)
    counts = [response.result.perf_metrics.num_accepted_draft_tokens for response in (first, second)]
    assert counts == [1, 2], "what is behind an end does not count"


def test_a_chunked_context_leaves_its_last_token_for_the_draft():
    scheduler = make_scheduler(max_num_tokens=8, chunked=True)
    Driver(scheduler).accept(make_drafted(5, prompt=8, new=6))
    batch = scheduler.schedule()
    assert [(len(chunk.token_ids), chunk.is_last) for chunk in batch.context] == [(4, False)]
    update(scheduler, batch)
    (chunk,) = scheduler.schedule().context
    assert (len(chunk.token_ids), chunk.num_draft_tokens) == (5, 1)


def test_prompt_lookup_drafts_tokens_that_followed_earlier():
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(prompt=(1, 2, 3, 4, 5, 1, 2), new=9, prompt_lookup_num_tokens=3))
    update(scheduler, scheduler.schedule(), (3,))
    batch = scheduler.schedule()
    (chunk,) = batch.context
    assert (chunk.start, chunk.token_ids, chunk.num_draft_tokens) == (7, (3, 4, 5, 1), 3)
    assert chunk.is_generation and chunk.is_last and batch.generation_slots == ()
    stats = scheduler.stats(batch)
    assert (stats.num_context_requests, stats.num_generation_requests) == (0, 1)
    update(scheduler, batch, (4, 9))
    batch = scheduler.schedule()
    assert batch.context == () and batch.generation_slots == (0,)


@pytest.mark.parametrize(("behind", "drafted"), [((1000,), ()), ((4, 1002, 6), (4,)), ((4, 6, 1001), (4, 6))])
def test_prompt_lookup_stops_before_rows_of_a_prompt_table(behind, drafted):
    scheduler = make_scheduler(hidden_size=2)
    request = with_table(prompt=(1000, 1, 2, 3, *behind, 1, 2), new=9, prompt_lookup_num_tokens=4)
    Driver(scheduler).accept(request)
    update(scheduler, scheduler.schedule(), (3,))
    batch = scheduler.schedule()
    assert [chunk.token_ids for chunk in batch.context] == ([(3, *drafted)] if drafted else [])
    assert batch.generation_slots == (() if drafted else (0,))


def test_a_draft_never_reaches_beyond_the_length_limit():
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(prompt=(1, 2, 3, 4, 5, 1, 2), new=3, prompt_lookup_num_tokens=9))
    update(scheduler, scheduler.schedule(), (3,))
    (chunk,) = scheduler.schedule().context
    assert chunk.token_ids == (3, 4)


# ---------------------------------------------------------------- stop words


def test_a_stop_word_ends_the_output_and_is_returned_but_never_fires_on_the_prompt():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(prompt=(7, 8), new=9, stop_words=((8, 9), (7, 8))))
    assert driver.step(token=9)[1] == []
    assert driver.step(token=7)[1] == []
    _, (final,) = driver.step(token=8)
    assert final.result.output_token_ids == ((7, 8, 9, 7, 8),)
    assert final.result.finish_reasons == (FinishReason.STOP_WORDS,)
