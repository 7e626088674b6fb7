"""This package and other systems on the same requests, one after the other, round by round, and the ratios.

Every run is a process of its own that loads, warms up and is timed while nothing else runs; the sides take turns,
so that whatever else the machine does meets all of them. A peer is a program in an environment of its own
(docs/comparing.md has the recipes). One thread, which waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console
from rich.table import Table

from inflight.bench.bandwidth import read_gb_per_s
from inflight.bench.options import positive
from inflight.bench.setup import cpu_name
from inflight.bench.sides import (
    CONVERTED,
    OURS,
    PEER_NAMES,
    Peer,
    Work,
    missing_libraries,
    run_ours,
    run_peer,
)
from inflight.bench.workload import WorkloadName, draw

Metric = Literal["output_tokens_per_s", "ttft_ms", "itl_ms", "peak_rss_bytes", "load_s", "start_s"]

_METRICS: tuple[Metric, ...] = get_args(Metric)
_LABELS = ("output tok/s", "TTFT ms", "ITL ms", "peak RSS GB", "load s", "start s")
_SCALES = (1, 1, 1, 1e-9, 1, 1)
_LONE_REQUESTS = 4
_TABLE_WIDTH = 110
_TITLES = {"w": "W: all requests at once", "lone": "lone: one request at a time"}


@dataclass(frozen=True)
class Run:
    """One side's run of one workload in one round; `values` is empty if it failed.

    `versions`: of a peer's packages.
    """

    side: str
    workload: WorkloadName
    values: Mapping[Metric, float]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A peer on a workload: its medians, ours divided by them, and the extremes of that ratio in single rounds."""

    medians: Mapping[Metric, float]
    ratios: Mapping[Metric, float]
    ranges: Mapping[Metric, tuple[float, float]]


def main() -> None:
    options = _parse(sys.argv[1:])
    peers = peers_of(options.peer_options)
    for peer in peers:
        for library in missing_libraries(peer):
            print(f"{peer.name} runs without {library}: not found", file=sys.stderr)
    names: tuple[WorkloadName, ...] = ("w", "lone") if options.workload == "both" else (options.workload,)
    with tempfile.TemporaryDirectory() as folder:
        works = [_prepare(options, name, Path(folder)) for name in names]
        runs = [
            run
            for number in range(1, options.rounds + 1)
            for work in works
            for run in _round(work, peers, number)
        ]
    _print_tables(runs, [peer.name for peer in peers])
    setup = _setup(options, works, runs)
    print(json.dumps({"bench": "compare", "setup": setup, "results": summarise(runs)}))


def _setup(options: argparse.Namespace, works: Sequence[Work], runs: Sequence[Run]) -> dict:
    versions = {OURS: {package: version(package) for package in ("inflight", "torch")}}
    return {
        "model": options.model.resolve().name,
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "requests": {work.workload: work.num_requests for work in works},
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions | {run.side: dict(run.versions) for run in runs if run.versions},
    }


# ---------------------------------------------------------------------- what is asked for


class _InOrder(argparse.Action):
    """Keeps --peer, --peer-python and --peer-model in their order: the latter two belong to the --peer before."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        namespace.peer_options = [*namespace.peer_options, (option_string, value)]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench compare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    of_a_peer = {"action": _InOrder, "dest": "peer_options", "default": []}
    parser.add_argument("--peer", choices=PEER_NAMES, help="may be repeated, for several", **of_a_peer)
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of the last --peer", **of_a_peer)
    parser.add_argument(
        "--peer-model", metavar="PATH", help="what the last --peer loads, if not --model", **of_a_peer
    )
    parser.add_argument("--dtype", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--workload", choices=("w", "lone", "both"), default="both")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=64, help=f"of W; lone has {_LONE_REQUESTS}")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    try:
        peers = peers_of(options.peer_options)
        if not peers:
            raise ValueError("expected a --peer")
        for peer in peers:
            _check(peer)
    except ValueError as error:
        parser.error(str(error))
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: expected a checkpoint folder with a config.json")
    return options


def peers_of(options: Sequence[tuple[str, str]]) -> list[Peer]:
    """(option, value) pairs in their order → peers. Raises ValueError for one out of place or missing."""
    found: list[dict[str, str]] = []
    for option, value in options:
        if option == "--peer":
            if any(fields["name"] == value for fields in found):
                raise ValueError(f"--peer {value}: given twice, expected once")
            found.append({"name": value})
        elif not found:
            raise ValueError(f"{option} {value}: expected after the --peer that it belongs to")
        else:
            found[-1][option.removeprefix("--peer-")] = value
    return [_peer(fields) for fields in found]


def _peer(fields: Mapping[str, str]) -> Peer:
    name, python, model = fields["name"], fields.get("python"), fields.get("model")
    if python is None:
        raise ValueError(f"--peer {name}: expected a --peer-python after it")
    return Peer(name, Path(python), Path(model) if model else None)


def _check(peer: Peer) -> None:
    if shutil.which(peer.python) is None:
        raise ValueError(f"--peer-python {peer.python}: expected an interpreter")
    if peer.model is None and peer.name in CONVERTED:
        raise ValueError(
            f"--peer {peer.name}: expected a --peer-model after it, the checkpoint in its own form"
        )
    if peer.model is not None and not peer.model.exists():
        raise ValueError(f"--peer-model {peer.model}: expected what {peer.name} loads, found nothing")


def _prepare(options: argparse.Namespace, workload: WorkloadName, folder: Path) -> Work:
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    num_requests = options.requests if workload == "w" else _LONE_REQUESTS
    requests = [
        {"prompt": request.prompt, "max_tokens": request.num_output_tokens}
        for request in draw(workload, vocab_size, num_requests)
    ]
    path = folder / f"{workload}.json"
    path.write_text(json.dumps(requests))
    return Work(options.model, workload, num_requests, path, options.dtype, options.threads)


# ---------------------------------------------------------------------- running


def _round(work: Work, peers: Sequence[Peer], number: int) -> Iterator[Run]:
    """Runs every side once, ours first, and prints a line for each."""
    for peer in (None, *peers):
        side = peer.name if peer else OURS
        before = read_gb_per_s(work.threads)
        printed = run_peer(peer, work) if peer else run_ours(work)
        memory = {"before": round(before, 1), "after": round(read_gb_per_s(work.threads), 1)}
        head = {"round": number, "side": side, "workload": work.workload, "memory_gb_per_s": memory}
        figures = {"failed": printed.failure} if printed.figures is None else printed.figures
        print(json.dumps({**head, **figures}), flush=True)
        yield Run(side, work.workload, values_of(figures), figures.get("versions", {}))


def values_of(figures: Mapping[str, object]) -> dict[Metric, float]:
    """The compared figures of a program's JSON; latencies are its medians. What it could not tell is left out."""
    values: dict[Metric, float] = {}
    for metric in _METRICS:
        value = figures.get(metric)
        value = value.get("p50") if isinstance(value, Mapping) else value
        if isinstance(value, (int, float)):
            values[metric] = float(value)
    return values


# ---------------------------------------------------------------------- what came out


def summarise(runs: Sequence[Run]) -> dict:
    """For each workload: our medians, and for each peer its medians and ours divided by them."""
    return {
        workload: {
            side: _as_json(compare(runs, workload, side)) if side != OURS else medians(runs, workload, OURS)
            for side in dict.fromkeys(run.side for run in runs)
        }
        for workload in dict.fromkeys(run.workload for run in runs)
    }


def compare(runs: Sequence[Run], workload: WorkloadName, peer: str) -> Comparison:
    """Medians of `peer` and ratios ours / peer, where both sides have the figure."""
    ours, theirs = medians(runs, workload, OURS), medians(runs, workload, peer)
    ratios = {
        metric: ours[metric] / theirs[metric]
        for metric in _METRICS
        if ours.get(metric) and theirs.get(metric)
    }
    pairs = zip(_runs_of(runs, workload, OURS), _runs_of(runs, workload, peer))
    of_rounds = [
        {metric: mine.values[metric] / other.values[metric] for metric in ratios}
        for mine, other in pairs
        if ratios.keys() <= mine.values.keys() & other.values.keys()
    ]
    ranges = {metric: _range([row[metric] for row in of_rounds]) for metric in ratios if of_rounds}
    return Comparison(theirs, ratios, ranges)


def _runs_of(runs: Sequence[Run], workload: WorkloadName, side: str) -> list[Run]:
    return [run for run in runs if run.workload == workload and run.side == side]


def medians(runs: Sequence[Run], workload: WorkloadName, side: str) -> dict[Metric, float]:
    """Of the rounds that told each figure; failed runs tell none."""
    rows = [run.values for run in _runs_of(runs, workload, side)]
    told = {metric: [row[metric] for row in rows if metric in row] for metric in _METRICS}
    return {metric: statistics.median(values) for metric, values in told.items() if values}


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _as_json(comparison: Comparison) -> dict:
    return {
        "medians": comparison.medians,
        "ratios": {metric: round(ratio, 3) for metric, ratio in comparison.ratios.items()},
        "ratios_of_rounds": {
            metric: [round(end, 3) for end in ends] for metric, ends in comparison.ranges.items()
        },
    }


def _print_tables(runs: Sequence[Run], peer_names: Sequence[str]) -> None:
    # A log file has no width; a table squeezed into 80 columns could not be read.
    console = Console(width=max(_TABLE_WIDTH, Console().width))
    for workload in dict.fromkeys(run.workload for run in runs):
        table = Table("", "runs", title=_TITLES[workload], title_justify="left")
        for label in _LABELS:
            table.add_column(label, justify="right")
        table.add_row(OURS, _count(runs, workload, OURS), *_cells(medians(runs, workload, OURS)))
        for name in peer_names:
            comparison = compare(runs, workload, name)
            table.add_row(name, _count(runs, workload, name), *_cells(comparison.medians))
            ratios = [f"{comparison.ratios[m]:.2f}" if m in comparison.ratios else "–" for m in _METRICS]
            table.add_row(f"{OURS} / {name}", "", *ratios, style="bold")
        console.print(table)


def _count(runs: Sequence[Run], workload: WorkloadName, side: str) -> str:
    own = _runs_of(runs, workload, side)
    return f"{sum(bool(run.values) for run in own)} of {len(own)}"


def _cells(values: Mapping[Metric, float]) -> list[str]:
    return [
        f"{values[metric] * scale:.1f}" if metric in values else "–"
        for metric, scale in zip(_METRICS, _SCALES)
    ]


if __name__ == "__main__":
    main()
