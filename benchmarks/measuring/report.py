"""Convert the times of responses to figures, and combine the figures of several rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.measuring.setup import ModelShape, Setup

T = TypeVar("T")

_DECIMALS = 3
_PEAKS = frozenset({"peak_rss_bytes", "server_peak_rss_bytes"})


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of one request.

    Attributes:
        num_prompt_tokens: Length of the prompt in tokens.
        num_output_tokens: Number of output tokens.
        sent_ns: Time of sending, in nanoseconds.
        responses_ns: Times of the responses in nanoseconds of the same clock. Each response has one token or
            more.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    sent_ns: int
    responses_ns: tuple[int, ...]

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from sending to the first response."""
        return 1e-6 * (self.responses_ns[0] - self.sent_ns)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between responses."""
        return [1e-6 * (later - earlier) for earlier, later in pairwise(self.responses_ns)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The median, and the 99th percentile by the nearest-rank method; 0 without values."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Compute the percentiles of values in any order."""
        ordered = sorted(values) or [0.0]
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.99 * last)])


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth in GB/s, right before a round and right after it."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that an engine used.

    Attributes:
        load_s: Seconds from reading the checkpoint to accepting requests, without imports.
        peak_rss_bytes: Peak resident memory of the process with the engine (VmHWM).
        server_peak_rss_bytes: Sum of the peak resident memory of all processes of a server; None without a
            server.
        start_s: Seconds from the start of the process, with imports, to accepting requests; None for a
            server.
    """

    load_s: float
    peak_rss_bytes: int
    server_peak_rss_bytes: int | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one round, or medians of several rounds. For memory, the highest value of all rounds.

    Attributes:
        output_tokens_per_s: Generated tokens per second, from the first request sent to the last response.
        total_tokens_per_s: Prompt tokens and generated tokens per second.
        tokens_per_response: Mean number of tokens per response; more than 1 if responses were merged.
        ttft_ms: Time to first token in milliseconds.
        itl_ms: Milliseconds between the responses of a request.
        gflop_per_s: GFLOP per second of all linear layers and the output projection, without attention.
        prefill_gflop_per_s: GFLOP of all prompts divided by the sum of their times to first token; only if
            requests run one at a time.
        decode_gflop_per_s: GFLOP of one token divided by the median gap; only if requests run one at a time.
            With 16-bit weights it equals the GB/s at which weights are read.
        memory_gb_per_s: Measured memory bandwidth.
        resources: Resources that the engine used.
    """

    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_response: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    gflop_per_s: float
    prefill_gflop_per_s: float | None
    decode_gflop_per_s: float | None
    memory_gb_per_s: Bandwidth
    resources: Resources


def summarize(
    timelines: Sequence[Timeline],
    shape: ModelShape,
    is_one_by_one: bool,
    bandwidth: Bandwidth,
    resources: Resources,
) -> Figures:
    """Return the figures of one round."""
    last_ns = max(timeline.responses_ns[-1] for timeline in timelines)
    seconds = 1e-9 * (last_ns - min(timeline.sent_ns for timeline in timelines))
    num_prompt = sum(timeline.num_prompt_tokens for timeline in timelines)
    num_output = sum(timeline.num_output_tokens for timeline in timelines)
    ttft = Percentiles.of([timeline.ttft_ms for timeline in timelines])
    itl = Percentiles.of([gap for timeline in timelines for gap in timeline.gaps_ms])
    # The last token of a request is not an input of the model.
    gflop = shape.gflop(num_prompt + num_output - len(timelines), num_output)
    prompt_gflop = shape.gflop(num_prompt, len(timelines))
    prompt_seconds = 1e-3 * sum(timeline.ttft_ms for timeline in timelines)
    return Figures(
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_prompt + num_output) / seconds,
        tokens_per_response=num_output / sum(len(timeline.responses_ns) for timeline in timelines),
        ttft_ms=ttft,
        itl_ms=itl,
        gflop_per_s=gflop / seconds,
        prefill_gflop_per_s=prompt_gflop / prompt_seconds if is_one_by_one else None,
        decode_gflop_per_s=1e3 * shape.gflop(1, 1) / itl.p50 if is_one_by_one and itl.p50 else None,
        memory_gb_per_s=bandwidth,
        resources=resources,
    )


def medians(rounds: Sequence[T]) -> T:
    """Return the medians of dataclasses of numbers, field by field.

    None stays None; of peaks, the highest value.
    """
    return _combine(rounds, is_peak=False)


def _combine(rounds: Sequence[T], is_peak: bool) -> T:
    first = rounds[0]
    if first is None or isinstance(first, (int, float)):
        combined = None if first is None else (max if is_peak else statistics.median)(rounds)  # type: ignore[type-var]
        return int(combined) if isinstance(first, int) else combined  # type: ignore[return-value, arg-type]
    assert is_dataclass(first)
    names = [field.name for field in fields(first)]
    parts = {name: _combine([getattr(each, name) for each in rounds], name in _PEAKS) for name in names}
    return type(first)(**parts)


def to_line(bench: str, figures: Figures, setup: Setup, **more: Any) -> str:
    """Return one line of JSON."""
    return json.dumps(_rounded({"bench": bench, **more, **to_values(figures), "setup": asdict(setup)}))


def to_values(figures: Figures) -> dict[str, Any]:
    """Return the values by name. The fields of `resources` are at the same level as the other figures."""
    values = asdict(figures)
    return values | values.pop("resources")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, _DECIMALS) if isinstance(value, float) else value
