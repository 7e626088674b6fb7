"""Declarations of all published metrics: names, labels, units, meanings and sources.

The families nv_trt_llm_… and nv_llm_… have the names of tensorrtllm_backend's. A gauge shows the value of a
key of the log line (`IterationStats.log_fields`), so that page and log cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from inflight.core.kv.store_stats import DISK, HOST, TierStats
from inflight.core.report.metrics import HistogramSnapshot, MetricsSnapshot
from inflight.core.request.stop import FinishReason
from inflight.errors import ERROR_CODES
from inflight.pictures.encoded_prompt import PictureStats

TIMESTAMP = "Timestamp"
"""The only key of the log line with a text value. Its gauge shows microseconds since the epoch."""


class Batching(Enum):
    """The kind of batching of an engine; some families exist for one kind only."""

    INFLIGHT = "in-flight batching"
    STATIC = "static batching"


@dataclass(frozen=True, slots=True)
class Gauge:
    """One series of a family of gauges.

    Attributes:
        value: Value of the family's label.
        log_key: Key of this value in the log line.
        unit: Unit of the value.
        meaning: Meaning of the value.
    """

    value: str
    log_key: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class GaugeFamily:
    """Gauges that differ in one label.

    Attributes:
        name, help: Name and help text of the family.
        label: Name of the label.
        gauges: One gauge for each value of the label.
        batching: The kind of batching for which the family exists; None: both.
    """

    name: str
    help: str
    label: str
    gauges: tuple[Gauge, ...]
    batching: Batching | None = None


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """Counters since the model was loaded.

    Attributes:
        name, help, unit: Name, help text and unit of the family.
        read: Function that returns the counts by label value; a family without a label has the key "".
        label: Name of the label; "": a single counter without label.
        values: Label values that exist from the start, with count 0.
    """

    name: str
    help: str
    unit: str
    read: Callable[[MetricsSnapshot], Mapping[str, int]]
    label: str = ""
    values: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class LevelFamily(CounterFamily):
    """Gauges of present numbers that are not in the log line. A label value that disappears shows 0."""


@dataclass(frozen=True, slots=True)
class PictureFamily:
    """Counters, or gauges, of the process that encodes pictures.

    Attributes:
        name, help, unit: Name, help text and unit of the family.
        kind: "counter" or "gauge".
        read: Function that returns the numbers by label value; a family without a label has the key "".
        label: Name of the label; "": a single number without label.
        values: The label's values.
    """

    name: str
    help: str
    unit: str
    kind: str
    read: Callable[[PictureStats], Mapping[str, float]]
    label: str = ""
    values: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """A histogram of observations since the model was loaded.

    Attributes:
        name, help, unit: Name, help text and unit of the family.
        field: Name of the MetricsSnapshot field with the histogram.
    """

    name: str
    help: str
    unit: str
    field: str

    def read(self, metrics: MetricsSnapshot) -> HistogramSnapshot:
        """Return the histogram in a snapshot."""
        return getattr(metrics, self.field)


@dataclass(frozen=True, slots=True)
class LengthFamily(HistogramFamily):
    """A histogram derived from another, with fewer buckets and one more label.

    Attributes:
        value: Value of the label.
        label: Name of the label.
        bounds: Upper bounds of the buckets.
    """

    value: str
    label: str = "response_metric_type"
    bounds: tuple[int, ...] = (10, 50, 100, 500, 1000)


Family = GaugeFamily | CounterFamily | LevelFamily | HistogramFamily | LengthFamily

GAUGES: tuple[GaugeFamily, ...] = (
    GaugeFamily(
        "nv_trt_llm_request_metrics",
        "Numbers of requests and sequences, by state",
        "request_type",
        (
            Gauge("active", "Active Request Count", "requests", "accepted requests without a final response"),
            Gauge("max", "Max Request Count", "sequences", "limit on the number of running sequences"),
            Gauge(
                "scheduled",
                "Scheduled Requests",
                "sequences",
                "sequences in the last iteration; with static batching, sequences in the last batch",
            ),
            Gauge(
                "context",
                "Context Requests",
                "sequences",
                "sequences for which the last iteration computed prompt tokens",
            ),
            Gauge("waiting", "Waiting Requests", "sequences", "sequences that wait or are paused"),
        ),
    ),
    GaugeFamily(
        "nv_trt_llm_runtime_memory_metrics",
        "Memory of the process that holds the engine",
        "memory_type",
        (
            Gauge("cpu", "Runtime CPU Memory Usage", "bytes", "resident host memory"),
            Gauge(
                "gpu", "Runtime GPU Memory Usage", "bytes", "memory that the process has reserved on devices"
            ),
            Gauge("pinned", "Runtime Pinned Memory Usage", "bytes", "host memory that is pinned for devices"),
        ),
    ),
    GaugeFamily(
        "nv_trt_llm_kv_cache_block_metrics",
        "Blocks of the paged KV cache",
        "kv_cache_block_type",
        (
            Gauge("max", "Max KV cache blocks", "blocks", "all blocks"),
            Gauge(
                "free",
                "Free KV cache blocks",
                "blocks",
                "blocks that no running request holds, including cached blocks",
            ),
            Gauge("used", "Used KV cache blocks", "blocks", "blocks that running requests hold"),
            Gauge(
                "tokens_per",
                "Tokens per KV cache block",
                "tokens",
                "number of tokens for which a block has room",
            ),
            Gauge(
                "reused",
                "Reused KV cache blocks",
                "blocks",
                "blocks that requests have found in the cache since the start",
            ),
            Gauge("fraction", "Fraction used KV cache blocks", "0 to 1", "used blocks divided by all blocks"),
        ),
    ),
    GaugeFamily(
        "nv_trt_llm_inflight_batcher_metrics",
        "The last iteration",
        "inflight_batcher_specific_metric",
        (
            Gauge(
                "total_context_tokens",
                "Total Context Tokens",
                "tokens",
                "prompt tokens that the iteration computed",
            ),
            Gauge(
                "generation_requests",
                "Generation Requests",
                "sequences",
                "sequences whose prompt was computed before, and for which the iteration generated tokens",
            ),
            Gauge(
                "micro_batch_id",
                "MicroBatch ID",
                "",
                "index of this iteration's batch among the batches in flight",
            ),
            Gauge(
                "paused_requests",
                "Paused Requests",
                "sequences",
                "sequences that were paused in the iteration and lost their KV blocks",
            ),
        ),
        Batching.INFLIGHT,
    ),
    GaugeFamily(
        "nv_trt_llm_v1_metrics",
        "The last static batch",
        "v1_specific_metric",
        (
            Gauge(
                "total_context_tokens", "Total Context Tokens", "tokens", "prompt tokens of the batch so far"
            ),
            Gauge(
                "total_generation_tokens",
                "Total Generation Tokens",
                "tokens",
                "generated tokens of the batch so far",
            ),
            Gauge(
                "empty_generation_slots",
                "Empty Generation Slots",
                "slots",
                "slots without a sequence, summed over the iterations of the batch",
            ),
        ),
        Batching.STATIC,
    ),
    GaugeFamily(
        "nv_trt_llm_general_metrics",
        "Time and iteration at which the values of the gauges were taken",
        "general_type",
        (
            Gauge("timestamp", TIMESTAMP, "µs", "this time, counted from the Unix epoch"),
            Gauge(
                "iteration_counter", "Iteration Counter", "iterations", "number of iterations since the start"
            ),
        ),
    ),
)

LENGTHS: tuple[LengthFamily, ...] = (
    LengthFamily(
        "nv_llm_input_token_len",
        "Number of prompt tokens of each request that has ended without an error",
        "tokens",
        "prompt_tokens",
        "total_input_tokens",
    ),
    LengthFamily(
        "nv_llm_output_token_len",
        "Number of generated tokens of each sequence that has ended",
        "tokens",
        "output_tokens",
        "total_output_tokens",
    ),
)

HISTOGRAMS: tuple[HistogramFamily, ...] = (
    HistogramFamily(
        "inflight_time_to_first_token_seconds",
        "Time from a request's arrival to its first token",
        "seconds",
        "time_to_first_token",
    ),
    HistogramFamily(
        "inflight_inter_token_latency_seconds",
        "Time between two successive iterations that generated tokens of the same sequence",
        "seconds",
        "inter_token_latency",
    ),
    HistogramFamily(
        "inflight_queue_time_seconds",
        "Time from a request's arrival to its first iteration",
        "seconds",
        "queue_time",
    ),
    HistogramFamily(
        "inflight_end_to_end_seconds",
        "Time from a request's arrival to its final response. Requests that end with an error are not counted",
        "seconds",
        "end_to_end",
    ),
    HistogramFamily(
        "inflight_prompt_tokens",
        "Number of prompt tokens of each request that has ended without an error",
        "tokens",
        "prompt_tokens",
    ),
    HistogramFamily(
        "inflight_output_tokens",
        "Number of generated tokens of each sequence that has ended. For a beam search, the number of its "
        "steps",
        "tokens",
        "output_tokens",
    ),
    HistogramFamily(
        "inflight_cancel_to_free_seconds",
        "Time from a stop or a cancellation until the request's slots and KV blocks were free",
        "seconds",
        "cancel_to_free",
    ),
    HistogramFamily(
        "inflight_guide_wait_seconds",
        "Time from a request's arrival until its guide (structured output) was compiled",
        "seconds",
        "guide_wait",
    ),
)

MEDIA = (HOST, DISK)
"""Values of the label `medium`: the places for saved KV blocks."""


def _by_medium(read: Callable[[TierStats], int]) -> Callable[[MetricsSnapshot], Mapping[str, int]]:
    """Return a function that reads one count of every tier of the block store."""
    return lambda metrics: {medium: read(metrics.block_store.tier(medium)) for medium in MEDIA}


TRANSFERS = {"kv_cache_transfer_ms": "KV cache transfer time", "request_count": "Request count"}
"""Label values and log keys of the only family of counters whose numbers are also in the log line."""

COUNTERS: tuple[CounterFamily, ...] = (
    CounterFamily(
        "nv_trt_llm_disaggregated_serving_metrics",
        "Disaggregated serving. The values are always 0, because one server computes both prompts and "
        "generated tokens",
        "ms, requests",
        lambda metrics: {},
        "disaggregated_serving_type",
        tuple(TRANSFERS),
    ),
    CounterFamily(
        "inflight_finished_sequences_total",
        "Sequences that have ended, by finish reason",
        "sequences",
        lambda metrics: {reason.name: count for reason, count in metrics.finished.items()},
        "finish_reason",
        tuple(reason.name for reason in FinishReason if reason is not FinishReason.NOT_FINISHED),
    ),
    CounterFamily(
        "inflight_failed_requests_total",
        "Requests that the engine refused, and requests that ended with an error, by Triton's error code",
        "requests",
        lambda metrics: metrics.failed,
        "code",
        ERROR_CODES,
    ),
    CounterFamily(
        "inflight_preemptions_total",
        "How often a sequence gave up its KV blocks for other sequences and computed them again later",
        "pauses",
        lambda metrics: {"": metrics.num_preemptions},
    ),
    CounterFamily(
        "inflight_kv_cache_hit_tokens_total",
        "Tokens in full KV blocks that a request found in the KV cache when it was admitted to the running "
        "batch",
        "tokens",
        lambda metrics: {"": metrics.num_hit_tokens},
    ),
    CounterFamily(
        "inflight_kv_cache_missed_tokens_total",
        "Tokens in full KV blocks that a request did not find in the KV cache when it was admitted to the "
        "running batch",
        "tokens",
        lambda metrics: {"": metrics.num_missed_tokens},
    ),
    CounterFamily(
        "inflight_saved_kv_blocks_total",
        "KV blocks that were saved in host memory or files (saved), that were loaded from there (loaded), or "
        "that were computed again although they had been saved (unread). A saved block is computed again if it "
        "was lost, or if computing it is faster than loading it",
        "blocks",
        lambda metrics: {
            "saved": metrics.num_saved_blocks,
            "loaded": metrics.num_loaded_blocks,
            "unread": metrics.num_unread_blocks,
        },
        "event",
        ("saved", "loaded", "unread"),
    ),
    CounterFamily(
        "inflight_kv_cache_offload_blocks_total",
        "KV blocks that were written to host memory (host), and to files (disk). A block that was written to both "
        "is counted in both",
        "blocks",
        _by_medium(lambda tier: tier.num_saved),
        "medium",
        MEDIA,
    ),
    CounterFamily(
        "inflight_kv_cache_offload_bytes_total",
        "Bytes of KV blocks that were written to host memory (host), and to files (disk)",
        "bytes",
        _by_medium(lambda tier: tier.saved_bytes),
        "medium",
        MEDIA,
    ),
    CounterFamily(
        "inflight_kv_cache_onboard_blocks_total",
        "Saved KV blocks that were loaded into the KV cache from host memory (host), and from files (disk)",
        "blocks",
        _by_medium(lambda tier: tier.num_loaded),
        "medium",
        MEDIA,
    ),
    CounterFamily(
        "inflight_kv_cache_onboard_bytes_total",
        "Bytes of saved KV blocks that were loaded into the KV cache from host memory (host), and from "
        "files (disk)",
        "bytes",
        _by_medium(lambda tier: tier.loaded_bytes),
        "medium",
        MEDIA,
    ),
    CounterFamily(
        "inflight_kv_cache_dropped_blocks_total",
        "Saved KV blocks that were removed from host memory (host), and from files (disk). A block is "
        "removed if room is needed, if it is too old, if it cannot be read, if it may be the cause of a failed "
        "request, or if there is a newer copy",
        "blocks",
        _by_medium(lambda tier: tier.num_dropped),
        "medium",
        MEDIA,
    ),
    CounterFamily(
        "inflight_processed_prompt_tokens_total",
        "Prompt tokens of requests that have got their first token, including tokens found in the KV cache",
        "tokens",
        lambda metrics: {"": metrics.num_prompt_tokens},
    ),
    CounterFamily(
        "inflight_generated_tokens_total",
        "Generated tokens, counted in every iteration. For a beam search, one token is counted for each beam "
        "and step",
        "tokens",
        lambda metrics: {"": metrics.num_generated_tokens},
    ),
    CounterFamily(
        "inflight_draft_tokens_total",
        "Draft tokens that were verified",
        "tokens",
        lambda metrics: {"": metrics.num_draft_tokens},
    ),
    CounterFamily(
        "inflight_accepted_draft_tokens_total",
        "Draft tokens that were accepted",
        "tokens",
        lambda metrics: {"": metrics.num_accepted_draft_tokens},
    ),
    CounterFamily(
        "inflight_guides_total",
        "Requests with a guide (structured output), by whether the guide could be compiled",
        "requests",
        lambda metrics: metrics.guides,
        "outcome",
        ("ready", "failed"),
    ),
    CounterFamily(
        "inflight_adapter_loads_total",
        "How often a LoRA adapter was loaded to the device",
        "loads",
        lambda metrics: {"": metrics.adapters.num_loads},
    ),
    CounterFamily(
        "inflight_adapter_evictions_total",
        "How often a LoRA adapter was evicted from the device",
        "evictions",
        lambda metrics: {"": metrics.adapters.num_evictions},
    ),
)

LEVELS: tuple[LevelFamily, ...] = (
    LevelFamily(
        "inflight_kv_cache_tier_blocks",
        "Saved KV blocks, in host memory (host) and in files (disk)",
        "blocks",
        _by_medium(lambda tier: tier.num_blocks),
        "medium",
        MEDIA,
    ),
    LevelFamily(
        "inflight_kv_cache_tier_bytes",
        "Bytes of saved KV blocks, in host memory (host) and in files (disk)",
        "bytes",
        _by_medium(lambda tier: tier.num_bytes),
        "medium",
        MEDIA,
    ),
    LevelFamily(
        "inflight_kv_cache_tier_max_bytes",
        "Limit on the total size of the saved KV blocks in host memory (host), and of those in files (disk). 0 "
        "means that no blocks are saved in this medium",
        "bytes",
        _by_medium(lambda tier: tier.max_bytes),
        "medium",
        MEDIA,
    ),
    LevelFamily(
        "inflight_adapters",
        "LoRA adapters in host memory, which requests may use (stored), and adapters that are on the device "
        "(on_device)",
        "adapters",
        lambda metrics: {"stored": metrics.adapters.num_stored, "on_device": metrics.adapters.num_resident},
        "place",
        ("stored", "on_device"),
    ),
    LevelFamily(
        "inflight_adapter_pages",
        "All pages of device memory for LoRA adapters (all), and the pages that running sequences use (used)",
        "pages",
        lambda metrics: {"all": metrics.adapters.num_pages, "used": metrics.adapters.num_used_pages},
        "use",
        ("all", "used"),
    ),
    LevelFamily(
        "inflight_adapter_running_requests",
        "Running requests, by the name of their LoRA adapter",
        "requests",
        lambda metrics: metrics.running_by_adapter,
        "lora_name",
        (),
    ),
    LevelFamily(
        "inflight_adapter_waiting_requests",
        "Waiting requests, by the name of their LoRA adapter",
        "requests",
        lambda metrics: metrics.waiting_by_adapter,
        "lora_name",
        (),
    ),
)
"""Adapters without a name have no series, because clients choose their ids and could create any number of
series."""

FAMILIES: tuple[Family, ...] = (*GAUGES, *LEVELS, *LENGTHS, *HISTOGRAMS, *COUNTERS)

PICTURES_MODEL = "multimodal_encoders"
"""The model that the labels of PICTURE_FAMILIES name; on tritonserver's page, its process publishes them."""

PICTURE_FAMILIES: tuple[PictureFamily, ...] = (
    PictureFamily(
        "inflight_pictures_total",
        "Pictures in prompts, by whether their rows of embeddings were computed (encoded) or found in the "
        "cache (cached)",
        "pictures",
        "counter",
        lambda stats: {"encoded": stats.num_encoded, "cached": stats.num_cache_hits},
        "rows",
        ("encoded", "cached"),
    ),
    PictureFamily(
        "inflight_picture_encoding_seconds_total",
        "Time in which picture files were turned into rows of embeddings",
        "seconds",
        "counter",
        lambda stats: {"": stats.milliseconds / 1000},
    ),
    PictureFamily(
        "inflight_picture_cache_bytes",
        "Size of the rows of embeddings that are cached for later prompts",
        "bytes",
        "gauge",
        lambda stats: {"": stats.cached_bytes},
    ),
)
"""Metrics of servers that encode pictures."""
