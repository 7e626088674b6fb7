"""The scheduler's metrics: counters and histograms since the start, and the counters of an iteration.

The scheduler reports events to `Observations`, on the loop thread; events of every row in every iteration are
counted in bulk. `ServiceMetrics.snapshot` makes a frozen copy for threads that publish metrics. Times are in
seconds, as Prometheus requires. Metrics influence no decision of the scheduler. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.kv.block_store import SavedBlocks
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.store_stats import StoreStats
from inflight.core.report.stats import AdapterStats, IterationCounts, StaticBatchStats
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.core.schedule.batch import ContextChunk, EngineLimits, ScheduledBatch
from inflight.errors import InflightError

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0,
)  # fmt: skip
TOKENS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; one more bucket without a bound follows.
        counts: Number of observations in each of the len(bounds) + 1 buckets; not cumulative.
        total: Sum of all observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observations(self) -> int:
        """Number of observations in all buckets."""
        return sum(self.counts)


class Histogram:
    """Counts of observed values by bucket; a value equal to a bound belongs to it, as in Prometheus."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        """Return a frozen copy of the counts."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """A frozen copy of ServiceMetrics at one moment, with the same names."""

    time_to_first_token: HistogramSnapshot
    inter_token_latency: HistogramSnapshot
    queue_time: HistogramSnapshot
    end_to_end: HistogramSnapshot
    prompt_tokens: HistogramSnapshot
    output_tokens: HistogramSnapshot
    cancel_to_free: HistogramSnapshot
    guide_wait: HistogramSnapshot
    finished: dict[FinishReason, int]
    failed: dict[str, int]
    guides: dict[str, int]
    running_by_adapter: dict[str, int]
    waiting_by_adapter: dict[str, int]
    adapters: AdapterStats
    num_preemptions: int
    num_hit_tokens: int
    num_missed_tokens: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_saved_blocks: int
    num_loaded_blocks: int
    num_unread_blocks: int
    block_store: StoreStats


@dataclass(slots=True)
class ServiceMetrics:
    """Counters and histograms since the start, which only grow, and gauges of adapters.

    Attributes:
        time_to_first_token: Seconds from arrival to a request's first token.
        inter_token_latency: Seconds between consecutive iterations in which a sequence gets tokens.
        queue_time: Seconds from arrival to a request's first iteration.
        end_to_end: Seconds from arrival to the final response.
        prompt_tokens: Prompt tokens of ended requests.
        output_tokens: Generated tokens of ended sequences; for a beam search, the number of steps.
        cancel_to_free: Seconds from a front end's stop to the release of slots and blocks.
        guide_wait: Seconds from arrival to the iteration in which the request's guide was ready.
        finished: Ended sequences by finish reason.
        failed: Requests that ended with an error or were refused, by the error's Triton code.
        guides: Guides of requests, by outcome: "ready" or "failed".
        running_by_adapter, waiting_by_adapter: Currently running and waiting requests, by the name of their
            adapter. Adapters without a name are not counted.
        adapters: The current numbers of adapters.
        num_preemptions: Number of times that a sequence was paused.
        num_hit_tokens, num_missed_tokens: Tokens of full blocks that admissions found, and did not find, in the KV
            cache. After a pause, generated tokens are counted too.
        num_prompt_tokens: Prompt tokens of requests that have got their first token.
        num_generated_tokens: Tokens given to sequences, counted as they arrive; a beam search counts one per beam
            and step.
        num_draft_tokens, num_accepted_draft_tokens: Draft tokens that were verified, and that were accepted.
        num_saved_blocks, num_loaded_blocks, num_unread_blocks: KV blocks that the block store saved, that were
            loaded from it, and that a load did not read, because they were lost or computing them was faster.
        block_store: The statistics of the block store and its tiers.
    """

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    cancel_to_free: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    guide_wait: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    finished: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    failed: Counter[str] = field(default_factory=Counter[str])
    guides: Counter[str] = field(default_factory=Counter[str])
    running_by_adapter: Counter[str] = field(default_factory=Counter[str])
    waiting_by_adapter: Counter[str] = field(default_factory=Counter[str])
    adapters: AdapterStats = field(default_factory=AdapterStats)
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    num_unread_blocks: int = 0
    block_store: StoreStats = field(default_factory=StoreStats)

    def snapshot(self) -> MetricsSnapshot:
        """Return a frozen copy of all metrics."""
        return MetricsSnapshot(*(_frozen(getattr(self, each.name)) for each in fields(MetricsSnapshot)))


def _frozen(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.snapshot()
    return dict(cast(Counter[Any], value)) if isinstance(value, Counter) else value


def adapter_stats(num_stored: int, pages: AdapterPages) -> AdapterStats:
    """Return the counters of LoRA adapters; `num_stored` is the number of adapters in the host's cache."""
    return AdapterStats(
        num_stored=num_stored,
        num_resident=pages.num_residents,
        num_pages=pages.count,
        num_used_pages=pages.count - pages.num_free,
        num_loads=pages.num_loads,
        num_evictions=pages.num_evictions,
    )


def seconds(duration_ns: int) -> float:
    """Convert nanoseconds to seconds, the unit of metrics."""
    return duration_ns * _NS


class Observations:
    """Counts the scheduler's events, for the statistics of each iteration and for the metrics.

    Attributes:
        metrics: Counters and histograms since the start.
    """

    def __init__(self, config: SchedulingConfig, limits: EngineLimits) -> None:
        self.metrics = ServiceMetrics()
        self._max_num_requests = limits.max_num_sequences
        self._max_sequence_length = limits.max_sequence_length
        self._max_num_tokens = config.max_num_tokens
        self._num_micro_batches = limits.num_micro_batches
        is_static = config.policy is CapacityPolicy.STATIC_BATCH
        self._static_batch = StaticBatchStats() if is_static else None
        # For sequences that get a token in this update: their number by the time of their last token. A dict,
        # because it is updated for every token and a Counter is slower.
        self._gaps: dict[int, int] = {}
        self._num_new_tokens = 0
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Reset the counts of the current iteration."""
        self._num_new = 0
        self._num_paused = 0
        self._queue_ns = 0
        self._num_completed = 0
        self._num_generated = 0
        self._num_advanced = 0
        self._num_accepted = 0

    # ---------------------------------------------------------------- what happens to requests

    def refused(self, error: InflightError) -> None:
        """Count a request that was refused or has failed."""
        self.metrics.failed[error.code] += 1

    def started(self, llm_request: LlmRequest, now_ns: int) -> None:
        """Count a sequence that runs for the first time."""
        waited_ns = now_ns - llm_request.group.arrival_ns
        self._num_new += 1
        self._queue_ns += waited_ns
        if not any(sequence.has_started for sequence in llm_request.group.sequences):
            self.metrics.queue_time.observe(seconds(waited_ns))

    def looked_up(self, num_found: int, num_missed: int) -> None:
        """Count the tokens of full blocks that an admission found in the cache, and that it did not find."""
        self.metrics.num_hit_tokens += num_found
        self.metrics.num_missed_tokens += num_missed

    def guide_known(self, group: RequestGroup, is_ready: bool, now_ns: int) -> None:
        """Count a guide that is ready or has failed."""
        self.metrics.guides["ready" if is_ready else "failed"] += 1
        if is_ready:
            self.metrics.guide_wait.observe(seconds(now_ns - group.arrival_ns))

    def saved_blocks_now(self, saved: SavedBlocks | None) -> None:
        """Record the counters of the block store."""
        if saved is not None:
            self.metrics.num_saved_blocks = saved.num_saved
            self.metrics.num_loaded_blocks = saved.num_loaded
            self.metrics.num_unread_blocks = saved.num_unread
            self.metrics.block_store = saved.stats

    def adapters_now(self, stats: AdapterStats, groups: Iterable[RequestGroup]) -> None:
        """Record the state of adapters, and the running and waiting requests of named adapters."""
        self.metrics.adapters = stats
        running, waiting = Counter[str](), Counter[str]()
        for group in groups:
            if (lora := group.request.lora) is not None and lora.name:
                is_running = any(sequence.state is RequestState.RUNNING for sequence in group.sequences)
                (running if is_running else waiting)[lora.name] += 1
        self.metrics.running_by_adapter, self.metrics.waiting_by_adapter = running, waiting

    def paused(self, count: int) -> None:
        """Count sequences paused to give their blocks to others."""
        self._num_paused += count
        self.metrics.num_preemptions += count

    def gets_tokens(self, llm_request: LlmRequest, count: int, num_drafts: int = 0) -> None:
        """Count the `count` tokens that a sequence is about to get; with drafts, `count` - 1 are accepted
        drafts."""
        last_ns = llm_request.last_token_ns
        self._gaps[last_ns] = self._gaps.get(last_ns, 0) + 1
        self._num_new_tokens += count
        if num_drafts:
            self._num_accepted += count - 1
            self.metrics.num_draft_tokens += num_drafts
            self.metrics.num_accepted_draft_tokens += count - 1

    def gave_first_token(self, llm_request: LlmRequest, now_ns: int) -> None:
        """Count a sequence's first token."""
        if not any(sequence.first_token_ns for sequence in llm_request.group.sequences):
            self.metrics.num_prompt_tokens += llm_request.request.prompt_length
            self.metrics.time_to_first_token.observe(seconds(now_ns - llm_request.group.arrival_ns))

    def updated(self, now_ns: int) -> None:
        """Add the counts of one update to the metrics."""
        for last_ns, count in self._gaps.items():
            if last_ns:
                self.metrics.inter_token_latency.observe(seconds(now_ns - last_ns), count)
        self._num_advanced += sum(self._gaps.values())
        self._gaps.clear()
        self._num_generated += self._num_new_tokens
        self.metrics.num_generated_tokens += self._num_new_tokens
        if (static := self._static_batch) is not None:
            total = static.num_generation_tokens + self._num_new_tokens
            self._static_batch = replace(static, num_generation_tokens=total)
        self._num_new_tokens = 0

    def sequence_ended(self, llm_request: LlmRequest) -> None:
        """Count a sequence that has ended and released its slots and blocks."""
        self.metrics.finished[llm_request.finish_reason] += 1
        self.metrics.output_tokens.observe(llm_request.num_generated)

    def request_ended(self, group: RequestGroup, now_ns: int) -> None:
        """Count a request that got its final response and released its slots and blocks."""
        self._num_completed += 1
        if group.error is not None:
            self.refused(group.error)
            return
        self.metrics.prompt_tokens.observe(group.request.prompt_length)
        self.metrics.end_to_end.observe(seconds(now_ns - group.arrival_ns))
        if group.stop_requested_ns:
            self.metrics.cancel_to_free.observe(seconds(now_ns - group.stop_requested_ns))

    # ---------------------------------------------------------------- static batches

    def count_static(self, batch: ScheduledBatch, is_new: bool, num_slots: int) -> None:
        """Count an iteration of a static batch, which has `num_slots` slots now; `is_new` marks its first
        iteration."""
        if self._static_batch is None:
            return
        before = StaticBatchStats() if is_new else self._static_batch
        generates = bool(batch.generation_slots) or any(chunk.is_generation for chunk in batch.context)
        most_slots = max(before.num_slots, num_slots)
        share = -(-most_slots // self._num_micro_batches)
        self._static_batch = replace(
            before,
            num_requests=before.num_requests + len(batch.starts),
            num_slots=most_slots,
            num_context_tokens=before.num_context_tokens + _context_tokens(batch.context),
            num_empty_slots=before.num_empty_slots + (max(0, share - batch.num_rows) if generates else 0),
        )

    # ---------------------------------------------------------------- statistics

    def iteration_stats(
        self,
        batch: ScheduledBatch | None,
        iteration: int,
        duration_ns: int,
        num_active: int,
        num_waiting: int,
        kv_cache: KvCacheManager,
        adapters: AdapterStats,
    ) -> IterationCounts:
        """Return the counters after the iteration that ran `batch`."""
        context = [chunk for chunk in batch.context if not chunk.is_generation] if batch else []
        num_scheduled = (
            batch.num_rows - sum(len(group.slots) - 1 for group in batch.beam_groups) if batch else 0
        )
        return IterationCounts(
            iteration=iteration,
            duration_ns=duration_ns,
            num_active_requests=num_active,
            num_completed_requests=self._num_completed,
            num_new_requests=self._num_new,
            new_requests_queue_ns=self._queue_ns,
            max_num_requests=self._max_num_requests,
            max_sequence_length=self._max_sequence_length,
            max_num_tokens=self._max_num_tokens,
            max_num_blocks=kv_cache.pool.num_blocks,
            num_free_blocks=kv_cache.pool.num_free,
            num_cached_blocks=kv_cache.pool.num_cached,
            tokens_per_block=kv_cache.tokens_per_block,
            num_scheduled_requests=num_scheduled,
            num_context_requests=len(context),
            num_generation_requests=num_scheduled - len(context),
            num_context_tokens=_context_tokens(context),
            num_generated_tokens=self._num_generated,
            num_advanced_sequences=self._num_advanced,
            num_draft_tokens=sum(chunk.num_draft_tokens for chunk in batch.context) if batch else 0,
            num_accepted_draft_tokens=self._num_accepted,
            num_drafted_requests=sum(chunk.num_draft_tokens > 0 for chunk in batch.context) if batch else 0,
            micro_batch_id=batch.micro_batch_id if batch else 0,
            num_waiting_requests=num_waiting,
            num_paused_requests=self._num_paused,
            num_taken_blocks=kv_cache.num_taken_blocks,
            num_reused_blocks=kv_cache.num_reused_blocks,
            num_missed_blocks=kv_cache.num_missed_blocks,
            num_generation_blocks=kv_cache.num_generation_blocks,
            num_partly_reused_blocks=kv_cache.num_partly_reused_blocks,
            num_copied_blocks=kv_cache.num_copied_blocks,
            block_peaks=kv_cache.pool.peaks,
            block_store=StoreStats() if kv_cache.saved is None else kv_cache.saved.stats,
            static_batch=self._static_batch,
            adapters=adapters,
        )


def _context_tokens(chunks: Sequence[ContextChunk]) -> int:
    return sum(len(chunk.token_ids) - chunk.num_draft_tokens for chunk in chunks if not chunk.is_generation)
