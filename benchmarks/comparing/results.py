"""Summarize the runs of all sides: medians, extremes, ratios, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

from benchmarks.comparing.sides import OURS

Group = Literal["w", "lone", "process"]
Metric = Literal[
    "output_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "memory_gb_per_s",
    "start_s",
    "load_s",
    "peak_rss_bytes",
    "beyond_bytes",
]
Values = Mapping[Group, Mapping[Metric, float]]

_TABLE_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Column:
    """A metric in a table.

    Attributes:
        metric: Name of the metric.
        label: Heading of the column.
        scale: Factor for shown values.
        decimals: Decimals of shown values.
        better: The better direction; None if the metric is not compared and has no ratios.
        is_peak: Whether the highest value of all rounds is shown instead of the median.
    """

    metric: Metric
    label: str
    scale: float = 1
    decimals: int = 1
    better: Literal["more", "less"] | None = "less"
    is_peak: bool = False


_SPEED = (
    Column("output_tokens_per_s", "output tok/s", better="more"),
    Column("ttft_ms", "TTFT ms"),
    Column("itl_ms", "ITL ms"),
)
_COLUMNS: Mapping[Group, tuple[Column, ...]] = {
    "w": _SPEED,
    "lone": (*_SPEED, Column("memory_gb_per_s", "memory GB/s", better=None)),
    "process": (
        Column("start_s", "start s"),
        Column("load_s", "load s"),
        Column("peak_rss_bytes", "peak GB", 1e-9, 2, is_peak=True),
        Column("beyond_bytes", "beyond weights, KV", 1e-9, 2, better=None, is_peak=True),
    ),
}
_TITLES: Mapping[Group, str] = {
    "w": "W: all requests at once",
    "lone": "lone: one request at a time; memory as it was read right after",
    "process": "the process; of memory, the highest of all rounds",
}


@dataclass(frozen=True)
class Run:
    """One side's process in one round.

    Attributes:
        side: Name of the side.
        values: Compared values; empty if the run failed.
        told: Everything that the side's program printed.
    """

    side: str
    values: Values
    told: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """A metric, or this package's ratio to a peer, over all rounds: the representative value and the extremes."""

    typical: float
    low: float
    high: float


@dataclass(frozen=True)
class Best:
    """The best peer for a metric, and this package's value divided by the peer's."""

    side: str
    ratio: float


def values_of(told: Mapping[str, object], memory_gb_per_s: float) -> Values:
    """Return the compared values in a program's JSON. Latencies are medians; missing figures are left out."""
    found: dict[Group, Mapping[Metric, float]] = {}
    for group, columns in _COLUMNS.items():
        part = told if group == "process" else told.get(group)
        if isinstance(part, Mapping):
            found[group] = _known(columns, {"memory_gb_per_s": memory_gb_per_s, **part})
    return found


def _known(columns: Sequence[Column], told: Mapping[str, object]) -> dict[Metric, float]:
    """Return the values of the columns' metrics that the program printed."""
    known: dict[Metric, float] = {}
    for column in columns:
        if (number := _number(told.get(column.metric))) is not None:
            known[column.metric] = number
    return known


def _number(value: object) -> float | None:
    value = value.get("p50") if isinstance(value, Mapping) else value
    return float(value) if isinstance(value, (int, float)) else None


def spreads(runs: Sequence[Run], group: Group, side: str) -> dict[Metric, Spread]:
    """Return the spread of each metric over the rounds that measured it. Failed runs have no metrics."""
    found: dict[Metric, Spread] = {}
    for column in _COLUMNS[group]:
        rows = [run.values.get(group, {}) for run in runs if run.side == side]
        values = [row[column.metric] for row in rows if column.metric in row]
        if values:
            typical = max(values) if column.is_peak else statistics.median(values)
            found[column.metric] = Spread(typical, min(values), max(values))
    return found


def ratios(runs: Sequence[Run], group: Group, peer: str) -> dict[Metric, Spread]:
    """Return this package's value / the peer's value for metrics that both have.

    Extremes are over the rounds in which both have the metric.
    """
    ours, theirs = spreads(runs, group, OURS), spreads(runs, group, peer)
    found: dict[Metric, Spread] = {}
    for column in _COLUMNS[group]:
        metric = column.metric
        if column.better and metric in ours and metric in theirs and theirs[metric].typical:
            typical = ours[metric].typical / theirs[metric].typical
            of_rounds = list(_ratios_of_rounds(runs, group, metric, peer)) or [typical]
            found[metric] = Spread(typical, min(of_rounds), max(of_rounds))
    return found


def _ratios_of_rounds(runs: Sequence[Run], group: Group, metric: Metric, peer: str) -> Iterable[float]:
    mine, others = ([run for run in runs if run.side == side] for side in (OURS, peer))
    for one, other in zip(mine, others):
        value, divisor = (run.values.get(group, {}).get(metric) for run in (one, other))
        if value is not None and divisor:
            yield value / divisor


def best_peers(runs: Sequence[Run], group: Group) -> dict[Metric, Best]:
    """Return the best peer for each metric that this package and at least one peer have."""
    peers = [side for side in sides_of(runs) if side != OURS]
    found: dict[Metric, Best] = {}
    for column in _COLUMNS[group]:
        known = {peer: ratios(runs, group, peer).get(column.metric) for peer in peers}
        typical = {peer: ratio.typical for peer, ratio in known.items() if ratio is not None}
        if typical:
            # This package's value is the same in all ratios, so its worst ratio belongs to the best peer.
            worst = (min if column.better == "more" else max)(typical, key=typical.__getitem__)
            found[column.metric] = Best(worst, typical[worst])
    return found


def sides_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the sides, in order."""
    return list(dict.fromkeys(run.side for run in runs))


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Return the groups for which any run has figures, in the order of the tables."""
    return [group for group in _COLUMNS if any(run.values.get(group) for run in runs)]


def to_values(runs: Sequence[Run]) -> dict:
    """Return a JSON object with the values by group of figures and side; each group also has `best_peer`."""
    return {group: _group_values(runs, group) for group in groups_of(runs)}


def _group_values(runs: Sequence[Run], group: Group) -> dict:
    values: dict[str, dict] = {}
    for side in sides_of(runs):
        found = spreads(runs, group, side)
        values[side] = {
            "medians": {metric: spread.typical for metric, spread in found.items()},
            "extremes": {metric: [spread.low, spread.high] for metric, spread in found.items()},
        }
        if side != OURS:
            of_peer = ratios(runs, group, side)
            values[side] |= {
                "ratios": {metric: round(ratio.typical, 3) for metric, ratio in of_peer.items()},
                "ratios_of_rounds": {
                    metric: [round(ratio.low, 3), round(ratio.high, 3)] for metric, ratio in of_peer.items()
                },
            }
    best = best_peers(runs, group)
    return values | {
        "best_peer": {metric: {"side": b.side, "ratio": round(b.ratio, 3)} for metric, b in best.items()}
    }


def print_tables(runs: Sequence[Run]) -> None:
    """Print a table per group of figures: every side, and this package's figures divided by the best peer's."""
    # A log file has no width, and a table squeezed into 80 columns would be unreadable.
    console = Console(width=max(_TABLE_WIDTH, Console().width))
    for group in groups_of(runs):
        console.print(_table(runs, group))


def _table(runs: Sequence[Run], group: Group) -> Table:
    table = Table("", "runs", title=_TITLES[group], title_justify="left")
    for column in _COLUMNS[group]:
        table.add_column(column.label, justify="right")
    for side in sides_of(runs):
        found = spreads(runs, group, side)
        cells = [_cell(column, found.get(column.metric)) for column in _COLUMNS[group]]
        table.add_row(side, _count(runs, group, side), *cells)
    best = best_peers(runs, group)
    if best:
        shown = [best.get(column.metric) for column in _COLUMNS[group]]
        cells = [f"{each.ratio:.2f} {each.side}" if each else "–" for each in shown]
        table.add_row(f"{OURS} / best peer", "", *cells, style="bold")
    return table


def _count(runs: Sequence[Run], group: Group, side: str) -> str:
    own = [run for run in runs if run.side == side]
    return f"{sum(bool(run.values.get(group)) for run in own)} of {len(own)}"


def _cell(column: Column, spread: Spread | None) -> str:
    if spread is None:
        return "–"
    typical, low, high = (
        f"{value * column.scale:.{column.decimals}f}" for value in (spread.typical, spread.low, spread.high)
    )
    return typical if low == high else f"{typical} ({low}–{high})"
