"""Metrics and statistics: exact values of every counter in small scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config import CapacityPolicy
from inflight.core.kv.block_pool import BlockPeaks
from inflight.core.report.metrics import SECONDS, TOKENS, HistogramSnapshot, MetricsSnapshot
from inflight.core.report.stats import IterationCounts, StaticBatchStats
from inflight.core.request.request import ExternalDraft
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.schedule.batch import ModelOutput
from inflight.errors import StepFailed

from .factories import Driver, make_request, make_scheduler

MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacityPolicy.STATIC_BATCH
MS = 1_000_000
SHORT, LONG = (1, 2, 3, 4, 5), (11, 12, 13, 14, 15, 16, 17, 18, 19)


class Observed:
    """A driver with a clock in milliseconds and separate times for requests and tokens."""

    def __init__(self, *arguments, **options) -> None:
        self.scheduler = make_scheduler(*arguments, **options)
        self.driver = Driver(self.scheduler)

    def iterate(
        self, at_ms: int, until_ms: int, *requests, stop=(), token: int | None = None
    ) -> IterationCounts:
        self.driver.accept(*requests, stop=stop, now_ns=at_ms * MS)
        batch, _ = self.driver.step(token, now_ns=until_ms * MS)
        return self.scheduler.stats(batch, (until_ms - at_ms) * MS)

    @property
    def metrics(self) -> MetricsSnapshot:
        return self.scheduler.metrics()


def three_requests() -> tuple[Observed, list[IterationCounts]]:
    """Two requests at once.

    A third with the second one's prompt, which arrived at the front end 8 ms before.
    """
    observed = Observed(reuse=True)
    stats = [
        observed.iterate(10, 15, make_request(1, SHORT, 3), make_request(2, LONG, 2)),
        observed.iterate(20, 26, make_request(3, LONG, 1, arrival_time_ns=12 * MS)),
        observed.iterate(30, 31),
    ]
    return observed, stats


FIRST_OF_THREE = IterationCounts(
    iteration=0,
    duration_ns=5 * MS,
    num_active_requests=2,
    num_completed_requests=0,
    num_new_requests=2,
    new_requests_queue_ns=0,
    max_sequence_length=256,
    max_num_requests=4,
    max_num_tokens=64,
    max_num_blocks=16,
    num_free_blocks=11,
    num_cached_blocks=0,
    tokens_per_block=4,
    num_scheduled_requests=2,
    num_context_requests=2,
    num_generation_requests=0,
    num_context_tokens=14,
    num_generated_tokens=2,
    num_advanced_sequences=2,
    micro_batch_id=0,
    num_waiting_requests=0,
    num_paused_requests=0,
    num_taken_blocks=5,
    num_reused_blocks=0,
    num_missed_blocks=3,
    block_peaks=BlockPeaks(free=16, held=5),
)


def test_statistics_of_each_iteration_count_three_requests():
    _, (first, second, third) = three_requests()
    assert first == FIRST_OF_THREE
    assert second == replace(
        first,
        iteration=2,
        duration_ns=6 * MS,
        num_active_requests=1,
        num_completed_requests=2,
        num_new_requests=1,
        new_requests_queue_ns=8 * MS,
        num_free_blocks=14,
        num_cached_blocks=2,  # of LONG
        num_scheduled_requests=3,
        num_context_requests=1,
        num_generation_requests=2,
        num_context_tokens=1,
        num_generated_tokens=3,
        num_advanced_sequences=3,
        num_taken_blocks=6,
        num_reused_blocks=2,
        block_peaks=BlockPeaks(free=14, held=6, cached=2),
    )
    assert third == replace(
        second,
        iteration=4,
        duration_ns=1 * MS,
        num_active_requests=0,
        num_completed_requests=1,
        num_new_requests=0,
        new_requests_queue_ns=0,
        num_free_blocks=16,
        num_cached_blocks=3,  # and of SHORT
        num_scheduled_requests=1,
        num_context_requests=0,
        num_generation_requests=1,
        num_context_tokens=0,
        num_generated_tokens=1,
        num_advanced_sequences=1,
        block_peaks=BlockPeaks(free=16, held=2, cached=3),
    )


def assert_observed(histogram: HistogramSnapshot, *values: float) -> None:
    """Assert that the histogram has these values, each in the first bucket whose bound it does not exceed."""
    bounds = histogram.bounds
    wanted = [0] * (len(bounds) + 1)
    for value in values:
        wanted[sum(value > bound for bound in bounds)] += 1
    assert histogram.counts == tuple(wanted) and histogram.num_observations == len(values)
    assert histogram.total == pytest.approx(sum(values))


def test_metrics_observe_times_and_lengths_of_three_requests():
    observed, _ = three_requests()
    metrics = observed.metrics
    assert_observed(metrics.time_to_first_token, 0.005, 0.005, 0.014)
    assert_observed(metrics.inter_token_latency, 0.011, 0.011, 0.005)
    assert_observed(metrics.queue_time, 0.0, 0.0, 0.008)
    assert_observed(metrics.end_to_end, 0.016, 0.014, 0.021)
    assert_observed(metrics.prompt_tokens, 9, 9, 5)
    assert_observed(metrics.output_tokens, 2, 1, 3)
    assert_observed(metrics.cancel_to_free)
    assert metrics.finished == {FinishReason.LENGTH: 3} and metrics.failed == {}
    assert (metrics.num_hit_tokens, metrics.num_missed_tokens, metrics.num_preemptions) == (8, 12, 0)
    assert metrics.end_to_end.bounds == SECONDS and metrics.output_tokens.bounds == TOKENS


def test_a_metrics_snapshot_does_not_change_after_it_is_taken():
    observed = Observed()
    observed.iterate(0, 1, make_request(1, new=1))
    before = observed.metrics
    observed.iterate(2, 3, make_request(2, new=1))
    assert before.finished == {FinishReason.LENGTH: 1} and before.end_to_end.num_observations == 1
    assert observed.metrics.finished == {FinishReason.LENGTH: 2}


def test_an_end_id_is_counted_as_generated_and_not_as_output():
    observed = Observed()
    stats = observed.iterate(0, 1, make_request(1, end_ids=(7,)), token=7)
    assert stats.num_generated_tokens == 1
    assert_observed(observed.metrics.output_tokens, 0)
    assert observed.metrics.finished == {FinishReason.END_ID: 1}


def test_a_token_of_a_request_that_has_ended_is_not_counted():
    observed = Observed()
    observed.iterate(0, 1, make_request(1), make_request(2))
    batch = observed.scheduler.schedule()
    observed.driver.accept(stop=[StopSignal(2, StopReason.CANCELLED, None, 10 * MS)], now_ns=12 * MS)
    observed.scheduler.update(batch, ModelOutput(0, [(7,), (7,)]), now_ns=19 * MS)
    stats = observed.scheduler.stats(batch)
    assert (stats.num_generated_tokens, stats.num_advanced_sequences) == (1, 1)


def test_a_cancel_is_measured_from_the_front_ends_call_to_the_free_slot():
    """The first request is stopped between two iterations, the second while its batch is in flight."""
    observed = Observed()
    observed.iterate(0, 1, make_request(1), make_request(2))
    batch = observed.scheduler.schedule()
    signals = [StopSignal(number, StopReason.CANCELLED, None, 10 * MS) for number in (1, 2)]
    observed.driver.accept(stop=signals[1:], now_ns=12 * MS)
    observed.scheduler.update(batch, ModelOutput(0, [(7,), (7,)]), now_ns=19 * MS)
    observed.driver.accept(stop=signals[:1], now_ns=22 * MS)
    metrics = observed.metrics
    assert_observed(metrics.cancel_to_free, 0.009, 0.012)
    assert metrics.finished == {FinishReason.CANCELLED: 2}


def test_a_cancel_that_is_repeated_counts_from_the_first():
    observed = Observed()
    observed.iterate(0, 1, make_request(1))
    batch = observed.scheduler.schedule()
    for requested_ms in (10, 15):
        signal = StopSignal(1, StopReason.CANCELLED, None, requested_ms * MS)
        observed.driver.accept(stop=(signal,), now_ns=16 * MS)
    observed.scheduler.update(batch, ModelOutput(0, [(7,)]), now_ns=19 * MS)
    assert_observed(observed.metrics.cancel_to_free, 0.009)


def test_a_timeout_is_not_counted_as_a_cancellation():
    observed = Observed()
    observed.iterate(0, 1, make_request(1, allotted_time_ms=5))
    observed.iterate(5, 6)
    assert observed.metrics.finished == {FinishReason.TIMED_OUT: 1}
    assert_observed(observed.metrics.cancel_to_free)


def test_errors_are_counted_by_code_and_not_in_latencies():
    observed = Observed(max_num_sequences=1, max_queue_size=1)
    observed.driver.accept(*(make_request(number) for number in (1, 2, 1, 3)), make_request(4, new=0))
    observed.scheduler.fail(observed.scheduler.schedule(), StepFailed("boom"))
    metrics = observed.metrics
    assert metrics.failed == {"ALREADY_EXISTS": 1, "UNAVAILABLE": 1, "INVALID_ARG": 1, "INTERNAL": 1}
    assert metrics.finished == {}
    assert_observed(metrics.end_to_end)
    assert_observed(metrics.prompt_tokens)


def test_sequences_of_a_request_end_separately_and_count_as_one_request():
    """Time to the first token and in the queue are those of the first sequence; its siblings wait for it."""
    observed = Observed()
    several = make_request(1, new=2, sampling=SamplingConfig(top_k=2, num_return_sequences=3))
    stats = [observed.iterate(0, 4, several), observed.iterate(5, 7), observed.iterate(8, 9)]
    assert [one.num_new_requests for one in stats] == [1, 2, 0]
    assert [one.new_requests_queue_ns for one in stats] == [0, 10 * MS, 0]
    assert [one.num_active_requests for one in stats] == [1, 1, 0]
    assert [one.num_completed_requests for one in stats] == [0, 0, 1]
    metrics = observed.metrics
    assert_observed(metrics.time_to_first_token, 0.004)
    assert_observed(metrics.queue_time, 0.0)
    assert_observed(metrics.inter_token_latency, 0.003, 0.002, 0.002)
    assert_observed(metrics.end_to_end, 0.009)
    assert_observed(metrics.prompt_tokens, 4)
    assert_observed(metrics.output_tokens, 2, 2, 2)
    assert metrics.finished == {FinishReason.LENGTH: 3}


def test_pauses_are_counted_and_paused_sequences_wait():
    """Two requests hold 2 of the 4 blocks each when both need a third, in the sixth iteration."""
    observed = Observed(MAX_UTILIZATION, num_blocks=4)
    stats = [observed.iterate(0, 1, make_request(1, new=8), make_request(2, new=8))]
    stats += [observed.iterate(at, at + 1) for at in range(1, 7)]
    assert [one.num_paused_requests for one in stats] == [0, 0, 0, 0, 0, 1, 0]
    assert [one.num_waiting_requests for one in stats] == [0, 0, 0, 0, 0, 1, 1]
    assert observed.metrics.num_preemptions == 1


def test_draft_tokens_are_counted():
    """Two of three draft tokens are accepted, beside a request without a draft."""
    observed = Observed()
    scheduler = observed.scheduler
    drafted = make_request(1, new=9, draft=ExternalDraft((5, 6, 7)))
    observed.driver.accept(drafted, make_request(2, new=9))
    batch = scheduler.schedule()
    scheduler.update(batch, ModelOutput(0, [(5, 6, 9), (3,)]), now_ns=1)
    stats = scheduler.stats(batch)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_drafted_requests) == (3, 2, 1)
    assert (stats.num_context_tokens, stats.num_generated_tokens, stats.num_context_requests) == (8, 4, 2)
    stats = observed.iterate(2, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_drafted_requests) == (0, 0, 0)
    metrics = observed.metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 2)
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (8, 6)


def test_an_iteration_without_a_batch_schedules_nothing():
    observed = Observed()
    stats = observed.iterate(3, 4)
    assert (stats.num_scheduled_requests, stats.num_context_tokens, stats.num_generated_tokens) == (0, 0, 0)
    assert (stats.num_free_blocks, stats.micro_batch_id, stats.static_batch) == (16, 0, None)


# ---------------------------------------------------------------- static batches


def test_a_static_batch_counts_its_requests_tokens_and_empty_slots():
    """Three requests of 1, 4 and 2 tokens: two slots are empty while the longest ends."""
    observed = Observed(STATIC_BATCH)
    arrived = [make_request(number, prompt, new) for number, prompt, new in ((1, 5, 1), (2, 3, 4), (3, 2, 2))]
    static = [observed.iterate(0, 1, *arrived).static_batch]
    late = make_request(4, 6, 2)
    static += [observed.iterate(at, at + 1, *([late] if at == 1 else [])).static_batch for at in range(1, 6)]
    # requests, slots, context tokens, generation tokens, empty slots
    assert static == [
        StaticBatchStats(3, 3, 10, 3, 0),
        StaticBatchStats(3, 3, 10, 5, 1),
        StaticBatchStats(3, 3, 10, 6, 3),
        StaticBatchStats(3, 3, 10, 7, 5),
        StaticBatchStats(1, 1, 6, 1, 0),
        StaticBatchStats(1, 1, 6, 2, 0),
    ]


def test_no_slot_is_empty_while_contexts_are_computed():
    """A prompt in three chunks beside a shorter one: the batch's generation has not begun."""
    observed = Observed(STATIC_BATCH, max_num_tokens=8, chunked=True)
    first = observed.iterate(0, 1, make_request(1, tuple(range(16)), 2), make_request(2, (99, 98), 3))
    second = observed.iterate(1, 2)
    assert first.static_batch == StaticBatchStats(2, 2, 8, 0, 0)
    assert second.static_batch == StaticBatchStats(2, 2, 16, 1, 0)
    third = observed.iterate(2, 3)
    assert third.static_batch == StaticBatchStats(2, 2, 18, 3, 0)


def test_statistics_have_the_highest_numbers_of_blocks_during_an_iteration():
    observed = Observed(reuse=True)
    first = observed.iterate(0, 1, make_request(1, LONG, 1))
    assert (first.num_free_blocks, first.num_cached_blocks) == (16, 2)
    assert first.block_peaks == BlockPeaks(free=16, held=3, cached=2), (
        "the request took three blocks and ended"
    )
    second = observed.iterate(2, 3, make_request(2, LONG, 2))
    assert (second.num_free_blocks, second.num_cached_blocks) == (13, 0)
    assert second.block_peaks == BlockPeaks(free=16, held=3, cached=2), "at its begin"
    third = observed.iterate(4, 5, make_request(3, SHORT, 2))
    assert third.block_peaks == BlockPeaks(free=14, held=5, cached=2), "the second request ended after it"


def test_statistics_tell_blocks_taken_in_generation_and_copied_ones():
    observed = Observed(reuse=True)
    first = observed.iterate(0, 1, make_request(1, LONG, 6))  # the third block has room for 3 more tokens
    assert (first.num_taken_blocks, first.num_generation_blocks) == (3, 0)
    while observed.scheduler.num_active:
        last = observed.iterate(2, 3, token=7)
    assert (last.num_taken_blocks, last.num_generation_blocks) == (4, 1)
    partly = observed.iterate(4, 5, make_request(2, (*LONG[:6], 50, 51, 52), 1))
    assert (partly.num_reused_blocks, partly.num_partly_reused_blocks, partly.num_copied_blocks) == (2, 1, 1)
    assert partly.num_missed_blocks - last.num_missed_blocks == 1, "it is not found as a whole"
