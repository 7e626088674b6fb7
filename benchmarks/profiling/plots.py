"""Write a profile as SVG files, with text elements and colours that are readable on white and on black.

This is the only module that imports matplotlib. Equal profiles give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.profiling.results import CacheRun, CacheSample, IterationCost, LoadPoint, Profile
from benchmarks.profiling.stopwatch import Stage

_GREY = "#808080"
_BLUE, _ORANGE, _GREEN, _RED = "#3b82f6", "#e8830c", "#1fa35c", "#e0455e"
_SHADES = ("#9467bd", "#17a2b8", "#e8830c", "#1fa35c", "#e0455e", "#b8860b", "#808080")
_WIDTH, _HEIGHT = 8.4, 3.4  # inches
_MAX_POINTS = 150
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "inflight",
    "font.family": "sans-serif",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _GREY
    ),
}


def draw_plots(profile: Profile, folder: Path) -> None:
    """Write iteration.svg, concurrency.svg and kv_cache.svg into `folder`."""
    with matplotlib.rc_context(_STYLE):
        with _figure(folder / "iteration.svg", 1) as axes:
            _draw_iterations(profile.iterations, *axes)
        with _figure(folder / "concurrency.svg", 1) as axes:
            _draw_load(profile.load, *axes)
        with _figure(folder / "kv_cache.svg", 2) as axes:
            _draw_cache(profile.cache, axes)


@contextmanager
def _figure(path: Path, num_lines: int) -> Iterator[list[Axes]]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT * (1 + 0.4 * (num_lines - 1))), layout="constrained")
    yield list(figure.subplots(num_lines, 2, sharex="col" if num_lines > 1 else False).flat)
    figure.savefig(path, metadata={"Date": None})


def _draw_iterations(costs: Sequence[IterationCost], whole: Axes, outside: Axes) -> None:
    labels = [str(cost.rows) for cost in costs]
    parts = (
        ("forward pass", _BLUE, [cost.stages_ms[Stage.FORWARD] for cost in costs]),
        ("all else", _RED, [cost.outside_ms for cost in costs]),
    )
    _stack(whole, labels, parts)
    for index, cost in enumerate(costs):
        whole.annotate(
            f"{cost.share_outside:.1%} else", (index, cost.total_ms), ha="center", va="bottom", fontsize=8
        )
    whole.margins(y=0.12)
    stages = [stage for stage in Stage if stage is not Stage.FORWARD]
    _stack(
        outside,
        labels,
        [
            (stage.name.lower(), colour, [cost.stages_ms[stage] for cost in costs])
            for stage, colour in zip(stages, _SHADES, strict=True)
        ],
    )
    whole.set_title("An iteration of generation")
    outside.set_title("What is not the forward pass")


def _stack(axes: Axes, labels: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Draw stacked bars. Each part is (name, colour, heights in milliseconds)."""
    bottoms = [0.0] * len(labels)
    for name, colour, heights in parts:
        axes.bar(labels, heights, bottom=bottoms, label=name, color=colour, width=0.65)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set(xlabel="rows", ylabel="ms")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize=8)  # in the order of the stacked bars


def _draw_load(points: Sequence[LoadPoint], speed: Axes, latency: Axes) -> None:
    concurrency = [point.concurrency for point in points]
    speed.plot(concurrency, [point.output_tokens_per_s for point in points], marker="o", color=_BLUE)
    speed.set(title="Throughput", ylabel="output tokens/s")
    speed.set_ylim(bottom=0)
    for name, colour, figures in (
        ("time to first token", _ORANGE, [point.ttft_ms for point in points]),
        ("between tokens", _GREEN, [point.itl_ms for point in points]),
    ):
        latency.plot(
            concurrency, [each.p50 for each in figures], marker="o", color=colour, label=f"{name}, p50"
        )
        latency.plot(concurrency, [each.p99 for each in figures], ":", color=colour, label="p99")
    latency.set(title="Latency", ylabel="ms", yscale="log")
    latency.yaxis.set_major_formatter("{x:g}")
    latency.legend(fontsize=8)
    for axes in (speed, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrency, [str(count) for count in concurrency])
        axes.set_xlabel("requests in flight")


def _draw_cache(runs: Sequence[CacheRun], axes: Sequence[Axes]) -> None:
    for run, blocks, requests in zip(runs, axes[: len(runs)], axes[len(runs) :], strict=True):
        samples = _thin(run.samples)
        times_s = [sample.time_s for sample in samples]
        used = [sample.used_blocks for sample in samples]
        blocks.plot(times_s, used, color=_BLUE, linewidth=1.2, label="used")
        blocks.axhline(run.blocks, color=_GREY, linestyle="--", linewidth=1, label="all")
        came = "all at once" if run.requests_per_s is None else f"{run.requests_per_s:.3g} requests/s"
        blocks.set(title=came, ylabel="KV blocks")
        blocks.set_ylim(bottom=0)
        running = [sample.running for sample in samples]
        waiting = [sample.waiting for sample in samples]
        requests.plot(times_s, running, color=_GREEN, linewidth=1.2, label="running")
        requests.plot(times_s, waiting, color=_ORANGE, linewidth=1.2, label="waiting")
        requests.set(xlabel="s", ylabel="requests")
        requests.set_ylim(bottom=0)
        blocks.legend(fontsize=8)
        requests.legend(fontsize=8)


def _thin(samples: Sequence[CacheSample]) -> list[CacheSample]:
    """Return about _MAX_POINTS of the samples, including the last, or all if there are fewer."""
    step = -(-len(samples) // _MAX_POINTS)
    return [*samples[:-1:step], *samples[-1:]]
