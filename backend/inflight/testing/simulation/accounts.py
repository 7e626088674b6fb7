"""Compare a scheduler's metrics, statistics and state with its observed work."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.request import IterationInput
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler

from .blame import BatchInFlight
from .cache_oracle import CacheOracle
from .queue_oracle import QueueOracle, sequences_of
from .scenario import Scenario


class Accounts:
    """Independent counts of one scheduler's work, compared with its reports."""

    def __init__(
        self, scenario: Scenario, scheduler: Scheduler, queue: QueueOracle, cache: CacheOracle
    ) -> None:
        self.num_pauses = 0
        self._scenario = scenario
        self._scheduler = scheduler
        self._queue = queue
        self._cache = cache
        self._active: set[int] = set()
        self._stopped: set[int] = set()  # requests that a front end ended as a whole, at a known time
        self._finished: Counter[FinishReason] = Counter()
        self._errors: Counter[str] = Counter()
        self._num_ended = 0
        self._num_freed = 0
        self._prompt_tokens = 0
        self._seen: Counter[tuple[int, int]] = Counter()  # tokens by (request id, sequence index)
        self._ended: set[tuple[int, int]] = set()  # sequences that had a final result
        self._gains: Counter[int] = Counter()  # number of updates in which a sequence key got tokens
        self._have_token: set[int] = set()  # request ids
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._num_completed = 0
        self._num_first_starts = len(self._queue.starts)
        self._num_pauses_before = self.num_pauses

    # ---------------------------------------------------------------- events

    def accepts(self, inputs: IterationInput, refused: set[int]) -> None:
        """Count the input of an iteration, without `refused` requests."""
        self._begin_iteration()
        self._active |= {r.request_id for r in inputs.new_requests if r.request_id not in refused}
        for stop in inputs.stops:
            if stop.requested_ns and stop.sequence_index is None and stop.request_id in self._active:
                self._stopped.add(stop.request_id)

    def scheduled(self, num_paused: int) -> None:
        """Add the number of sequences that an iteration paused."""
        self.num_pauses += num_paused

    def updates(self, flight: BatchInFlight, live: Iterable[LlmRequest]) -> None:
        """Count the `live` rows of a batch that is about to come back."""
        sampled = set(flight.batch.sampled_slots())
        for llm_request in live:
            if sampled.intersection(llm_request.slots):
                self._gains[llm_request.key] += 1
                self._have_token.add(llm_request.request_id)

    def answered(self, responses: Sequence[Response]) -> None:
        """Add an iteration's responses to the counts of tokens, errors and finish reasons."""
        for response in responses:
            result = response.result
            if response.error is not None:
                self._errors[response.error.code] += 1
            elif result is not None:
                self._take(response.request_id, result)
            if not response.is_final:
                continue
            was_active = response.request_id in self._active
            self._active.discard(response.request_id)
            self._num_completed += was_active
            if response.error is None:
                self._num_ended += 1
                self._num_freed += response.request_id in self._stopped
                self._prompt_tokens += self._scenario.requests[response.request_id].prompt_length

    def _take(self, request_id: int, result: SequenceResult) -> None:
        name = request_id, result.sequence_index
        self._seen[name] += 0 if result.is_cumulative else result.num_output_tokens[0]
        if result.is_sequence_final:
            self._finished[result.finish_reasons[0]] += 1
            self._ended.add(name)

    # ---------------------------------------------------------------- checks

    def check_iteration(self, batch: ScheduledBatch | None, rows: Sequence[LlmRequest]) -> None:
        """Check the statistics after an iteration."""
        stats = self._scheduler.stats(batch)
        waiting = [
            r
            for r in sequences_of(self._scheduler)
            if r.state is RequestState.PAUSED or (r.state is RequestState.WAITING and self._is_queued(r))
        ]
        held = [group for group in self._scheduler._groups.values() if group.is_held]
        assert stats.num_active_requests == self._scheduler.num_active == len(self._active)
        assert stats.num_completed_requests == self._num_completed
        assert stats.num_new_requests == len(self._queue.starts) - self._num_first_starts
        assert stats.num_paused_requests == self.num_pauses - self._num_pauses_before
        assert stats.num_waiting_requests == len(waiting) + len(held)
        assert stats.num_scheduled_requests == len(rows)
        assert stats.num_context_requests + stats.num_generation_requests == len(rows)
        assert 0 <= stats.num_accepted_draft_tokens <= stats.num_generated_tokens
        assert stats.max_num_tokens == self._scenario.config.max_num_tokens
        assert stats.max_num_requests == self._scenario.limits.max_num_sequences
        assert stats.num_free_blocks == self._scheduler.kv_cache.pool.num_free
        assert stats.num_reused_blocks == self._scheduler.kv_cache.num_reused_blocks
        assert stats.num_missed_blocks == self._scheduler.kv_cache.num_missed_blocks
        assert stats.num_partly_reused_blocks <= stats.num_reused_blocks
        assert stats.num_generation_blocks <= stats.num_taken_blocks
        now, most = (stats.num_free_blocks, stats.num_used_blocks, stats.num_cached_blocks), stats.block_peaks
        for count, peak in zip(now, (most.free, most.held, most.cached), strict=True):
            assert count <= peak <= stats.max_num_blocks

    def _is_queued(self, llm_request: LlmRequest) -> bool:
        return not llm_request.group.is_held and (llm_request.leads or llm_request.group.has_context)

    def check_state(self) -> None:
        """Check that the state lists every sequence once, with a reason if it waits."""
        state, kv_cache = self._scheduler.state(), self._scheduler.kv_cache
        present = [
            r for r in sequences_of(self._scheduler) if r.slots or r.state is not RequestState.FINISHED
        ]
        listed = [(each.request_id, each.sequence_index) for each in (*state.waiting, *state.running)]
        assert sorted(listed) == sorted((r.request_id, r.sequence_index) for r in present)
        for each in state.waiting:
            assert each.why
            if lack := re.match(r"needs (\d+) \w+, (\d+) free", each.why):
                assert int(lack[1]) > int(lack[2])
        assert {r.key for r in self._scheduler.running_sequences} == {r.key for r in present if r.slots}
        taken = sum(len(each.slots) for each in state.running)
        assert state.slots - state.free_slots == taken
        blocks = state.blocks
        assert blocks.held + blocks.cached + blocks.empty == blocks.total == self._scenario.limits.num_blocks
        assert blocks.reserved == sum(each.reserved_blocks for each in state.running)
        assert blocks.held == kv_cache.pool.num_held and blocks.shared <= blocks.held
        assert set(state.suspects) <= set(self._scenario.requests)

    def check_request_stats(self, batch: ScheduledBatch | None, rows: Sequence[LlmRequest]) -> None:
        """Check that request statistics list every sequence once and mark those of the batch."""
        told = {(s.request_id, s.sequence_index): s for s in self._scheduler.request_stats(batch)}
        present = [
            r for r in sequences_of(self._scheduler) if r.slots or r.state is not RequestState.FINISHED
        ]
        assert told.keys() == {(r.request_id, r.sequence_index) for r in present}
        for llm_request in present:
            stats = told[llm_request.request_id, llm_request.sequence_index]
            assert stats.num_generated_tokens == llm_request.num_generated
            assert stats.is_paused == (llm_request.state is RequestState.PAUSED)
            assert not stats.is_scheduled or llm_request in rows

    def check_end(self) -> None:
        """Check the metrics after the last request."""
        told: MetricsSnapshot = self._scheduler.metrics()
        assert told.finished == dict(self._finished)
        assert told.failed == dict(self._errors)
        self._check_output_tokens(told)
        assert told.prompt_tokens.num_observations == self._num_ended
        assert told.prompt_tokens.total == self._prompt_tokens
        assert told.end_to_end.num_observations == self._num_ended
        assert told.cancel_to_free.num_observations == self._num_freed
        assert told.num_preemptions == self.num_pauses
        started = {r.request_id for r in self._queue.starts}
        assert told.queue_time.num_observations == len(started)
        assert told.time_to_first_token.num_observations == len(self._have_token)
        gaps = self._gains.total() - len(self._gains)
        assert told.inter_token_latency.num_observations == gaps
        kv_cache, size = self._scheduler.kv_cache, self._scenario.limits.tokens_per_block
        assert told.num_hit_tokens == self._cache.num_tokens
        assert told.num_missed_tokens == kv_cache.num_missed_blocks * size

    def _check_output_tokens(self, told: MetricsSnapshot) -> None:
        """Check the histogram of output tokens against the returned tokens of finished sequences."""
        total = 0
        for llm_request in self._queue.ended:
            name = llm_request.request_id, llm_request.sequence_index
            if name not in self._ended:
                continue
            total += llm_request.num_generated
            if not llm_request.request.sampling.uses_beams:
                assert self._seen[name] == llm_request.num_generated
        assert told.output_tokens.num_observations == self._finished.total()
        assert told.output_tokens.total == total
