"""The engine's metrics in Prometheus' text format, for servers without a tritonserver.

Names, labels and values are those of tritonserver's page (`triton/metrics.py`); histograms have the type
histogram. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise

from inflight.core.report.metrics import HistogramSnapshot, MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage, microseconds
from inflight.pictures.encoded_prompt import PictureStats
from inflight.serving.metric_table import (
    FAMILIES,
    PICTURE_FAMILIES,
    PICTURES_MODEL,
    TIMESTAMP,
    Batching,
    CounterFamily,
    GaugeFamily,
    HistogramFamily,
    LengthFamily,
    LevelFamily,
)

CONTENT_TYPE = "text/plain; version=0.0.4"


def metrics_page(
    stats: IterationCounts,
    metrics: MetricsSnapshot,
    wall_clock_s: float,
    memory: MemoryUsage,
    labels: Mapping[str, str],
) -> str:
    """Return the page of one engine.

    Args:
        stats, metrics: Its present statistics and metrics.
        wall_clock_s: The time, in seconds since the epoch.
        memory: Memory of the engine's process.
        labels: Labels of every metric, which name the model.
    """
    fields = {**stats.log_fields(wall_clock_s, memory), TIMESTAMP: microseconds(wall_clock_s)}
    batching = Batching.INFLIGHT if stats.static_batch is None else Batching.STATIC
    lines: list[str] = []
    for family in FAMILIES:
        if not isinstance(family, GaugeFamily):
            lines += _family(family, metrics, labels)
        elif family.batching in (None, batching):
            values = {gauge.value: float(fields[gauge.log_key]) for gauge in family.gauges}
            lines += _series(family.name, "gauge", family.help, family.label, values, labels)
    return "".join(f"{line}\n" for line in lines)


def pictures_page(stats: PictureStats) -> str:
    """Return the lines of the page about pictures."""
    labels = {"model": PICTURES_MODEL, "version": "1"}
    lines: list[str] = []
    for family in PICTURE_FAMILIES:
        lines += _series(family.name, family.kind, family.help, family.label, family.read(stats), labels)
    return "".join(f"{line}\n" for line in lines)


def _family(
    family: CounterFamily | HistogramFamily, metrics: MetricsSnapshot, labels: Mapping[str, str]
) -> Iterator[str]:
    if isinstance(family, CounterFamily):
        kind = "gauge" if isinstance(family, LevelFamily) else "counter"
        values = dict.fromkeys(family.values, 0) | dict(family.read(metrics))
        return _series(family.name, kind, family.help, family.label, values, labels)
    snapshot = family.read(metrics)
    if isinstance(family, LengthFamily):
        snapshot = _with_bounds(snapshot, family.bounds)
        labels = {**labels, family.label: family.value}
    return histogram_lines(family.name, family.help, {label_text(labels): snapshot})


def _series(
    name: str, kind: str, help: str, label: str, values: Mapping[str, float], labels: Mapping[str, str]
) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
    for value, number in values.items():
        own = {**labels, label: value} if label else labels
        yield f"{name}{{{label_text(own)}}} {_number(number)}"


def _number(value: float) -> str:
    return f"{value:.16g}"


def histogram_lines(
    name: str,
    help: str,
    snapshots: Mapping[str, HistogramSnapshot],
    bound_text: Callable[[float], str] = _number,
) -> Iterator[str]:
    """Return the lines of a histogram: its snapshots by the text of their labels, which may be empty."""
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} histogram"
    for labels, snapshot in snapshots.items():
        comma = "," if labels else ""
        bounds = (*map(bound_text, snapshot.bounds), "+Inf")
        for bound, count in zip(bounds, accumulate(snapshot.counts), strict=True):
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {count}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {_number(snapshot.total)}"
        yield f"{name}_count{braces} {snapshot.num_observations}"


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as the text format has them between braces."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


def escaped(value: str) -> str:
    """Escape a label's value for the text format."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _with_bounds(snapshot: HistogramSnapshot, bounds: tuple[int, ...]) -> HistogramSnapshot:
    """Return a histogram with fewer buckets: `bounds` are some of its own."""
    up_to = dict(zip(snapshot.bounds, accumulate(snapshot.counts), strict=False))
    totals = [0, *(up_to[bound] for bound in bounds), snapshot.num_observations]
    counts = tuple(after - before for before, after in pairwise(totals))
    return HistogramSnapshot(bounds, counts, snapshot.total)
