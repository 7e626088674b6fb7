"""The tables of docs/metrics.md, written from the table of metrics so that they cannot disagree with it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from inflight.core.report.metrics import ServiceMetrics
from inflight.serving.metric_table import COUNTERS, GAUGES, HISTOGRAMS, LENGTHS
from inflight.triton.reference_page import between_markers


def fill_in(page: str) -> str:
    """The page with what stands between its markers written anew."""
    return between_markers(page, tables())


def tables() -> str:
    """The tables of gauges, histograms and counters in Markdown."""
    parts = ["## Gauges", "", *_gauges(), "", "## Histograms", "", *_histograms(), ""]
    parts += [
        "Upper bounds of the buckets, beside +Inf:",
        "",
        *_bounds(),
        "",
        "## Counters",
        "",
        *_counters(),
    ]
    return "\n".join(parts)


def _gauges() -> Iterator[str]:
    yield "| metric | unit | meaning | in the log line |"
    yield "|---|---|---|---|"
    for family in GAUGES:
        only = f" (only {family.batching.value})" if family.batching else ""
        yield f"| **`{family.name}`** | | {family.help}{only} | |"
        for gauge in family.gauges:
            label = f'`{family.label}="{gauge.value}"`'
            yield f"| {label} | {gauge.unit or '–'} | {gauge.meaning} | `{gauge.log_key}` |"


def _histograms() -> Iterator[str]:
    yield "| metric | unit | meaning | label |"
    yield "|---|---|---|---|"
    for histogram in HISTOGRAMS:
        yield f"| `{histogram.name}` | {histogram.unit} | {histogram.help} | – |"
    for lengths in LENGTHS:
        label = f'`{lengths.label}="{lengths.value}"`'
        yield f"| `{lengths.name}` | {lengths.unit} | {lengths.help} | {label} |"


def _bounds() -> Iterator[str]:
    nothing = ServiceMetrics().snapshot()
    by_bounds: dict[tuple[float, ...], list[str]] = {}
    for histogram in HISTOGRAMS:
        by_bounds.setdefault(histogram.read(nothing).bounds, []).append(histogram.name)
    for lengths in LENGTHS:
        by_bounds.setdefault(lengths.bounds, []).append(lengths.name)
    for bounds, names in by_bounds.items():
        numbers = ", ".join(format(bound, ".16g") for bound in bounds)
        yield f"- {', '.join(f'`{name}`' for name in names)}: {numbers}"


def _counters() -> Iterator[str]:
    yield "| metric | unit | meaning | label |"
    yield "|---|---|---|---|"
    for family in COUNTERS:
        values = ", ".join(family.values)
        label = f"`{family.label}`: {values}" if family.label else "–"
        yield f"| `{family.name}` | {family.unit} | {family.help} | {label} |"


def main() -> None:
    """Rewrite the page named on the command line."""
    path = Path(sys.argv[1])
    path.write_text(fill_in(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
