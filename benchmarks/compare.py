"""Compare this package's speed with that of other systems, on the same requests, and print the ratios.

Every run is a process of its own, which loads the model once, and then is warmed up and timed for each
workload. Only one process runs at a time, and the sides alternate, so that other load on the machine affects
all of them. A peer is a program in an environment of its own (docs/comparing.md describes how to create it).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.comparing.peer_models import check_peer_model
from benchmarks.comparing.results import Run, print_tables, to_values, values_of
from benchmarks.comparing.sides import (
    CONVERTED,
    OURS,
    PEER_NAMES,
    Printed,
    Side,
    Work,
    missing_libraries,
    ours,
    run,
)
from benchmarks.measuring.bandwidth import read_gb_per_s
from benchmarks.measuring.options import kv_cache_tokens, new_parser
from benchmarks.measuring.setup import ModelShape, cpu_name
from benchmarks.measuring.workload import BenchRequest, WorkloadName, draw
from inflight.arguments import positive
from inflight.errors import InflightError
from inflight.hub import find_checkpoint
from inflight.models import read_model_description
from inflight.models.levels import MatrixKind
from inflight.models.loader import quantized_kinds
from inflight.processors import Processors

_LONE_REQUESTS = 4
_TIMEOUT_S = 3600
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def main() -> int:
    """Run the comparison; return 1 if any run failed. Failed runs are not part of the medians."""
    options = _parse(sys.argv[1:])
    peers = peers_of(options.peer_options)
    for peer in peers:
        for library in missing_libraries(peer):
            print(f"{peer.name} runs without {library}: not found", file=sys.stderr)
    # Without this, the running side would continue after this process is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ENDED_BY_SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        work = _prepare(options, Path(folder))
        runs = list(_rounds([ours(), *peers], work, options.shape, options.rounds))
    print_tables(runs)
    setup = _setup(options, work, runs)
    failed = Counter(run.side for run in runs if not run.values)
    print(json.dumps({"bench": "compare", "setup": setup, "failed_runs": failed, "results": to_values(runs)}))
    for side, count in failed.items():
        print(f"{count} of {side}'s runs failed", file=sys.stderr)
    return 1 if failed else 0


def _setup(options: argparse.Namespace, work: Work, runs: Sequence[Run]) -> dict:
    told = {run.side: run.told for run in runs if run.values}
    return {
        "model": options.model.resolve().name,
        "dtype": options.dtype,
        "kernels": told.get(OURS, {}).get("kernels"),
        "threads": options.threads,
        "rounds": options.rounds,
        "requests": {name: len(requests) for name, requests in _workloads(options).items()},
        "kv_cache_tokens": work.kv_cache_tokens,
        "kv_caches": {side: figures.get("kv_cache") for side, figures in told.items()},
        "weight_bytes": options.shape.weight_bytes(options.dtype),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": {side: figures.get("versions") for side, figures in told.items()},
    }


# ---------------------------------------------------------------------- the command line


class _InOrder(argparse.Action):
    """Stores --peer, --peer-python and --peer-model in order, as the last two refer to the preceding --peer."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        namespace.peer_options = [*namespace.peer_options, (option_string, value)]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("compare", __doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="checkpoint folder or GGUF file"
    )
    of_a_peer = {"action": _InOrder, "dest": "peer_options", "default": []}
    parser.add_argument(
        "--peer", choices=PEER_NAMES, help="system to compare with; may be repeated", **of_a_peer
    )
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of the last --peer", **of_a_peer)
    parser.add_argument(
        "--peer-model",
        metavar="PATH",
        help="model of the last --peer, if it does not load --model",
        **of_a_peer,
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "int8", "int4"),
        default="bfloat16",
        help="int8 and int4: quantized checkpoints run as they are; int4: --model is a 4-bit checkpoint",
    )
    parser.add_argument("--workload", choices=("w", "lone", "both"), default="both")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--requests", type=positive, default=64, help=f"requests of W; lone has {_LONE_REQUESTS}"
    )
    parser.add_argument("--threads", type=positive, default=Processors.here().num_threads)
    parser.add_argument(
        "--timeout",
        type=positive,
        default=_TIMEOUT_S,
        metavar="S",
        help="time after which a run is ended",
    )
    options = parser.parse_args(arguments)
    try:
        options.model = find_checkpoint(str(options.model), may_fetch=False)
        model = read_model_description(options.model)
        options.shape = ModelShape.of(model.decoder)
        if (options.dtype == "int4") != (MatrixKind.INT4 in quantized_kinds(model)):
            raise ValueError(
                f"--dtype {options.dtype}: expected int4 with a --model of 4 bits, and only then"
            )
        peers = peers_of(options.peer_options)
        if not peers:
            raise ValueError("expected a --peer")
        for peer in peers:
            _check(peer, options.model, options.dtype)
    except (ValueError, InflightError) as error:
        parser.error(str(error))
    return options


def peers_of(options: Sequence[tuple[str, str]]) -> list[Side]:
    """Convert (option, value) pairs to peers. Raises ValueError for a misplaced or missing option."""
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


def _peer(fields: Mapping[str, str]) -> Side:
    name, python, model = fields["name"], fields.get("python"), fields.get("model")
    if python is None:
        raise ValueError(f"--peer {name}: expected a --peer-python after it")
    return Side(name, Path(python), Path(model) if model else None)


def _check(peer: Side, model: Path, dtype: str) -> None:
    if shutil.which(peer.python) is None:
        raise ValueError(f"--peer-python {peer.python}: expected an interpreter")
    if peer.model is None and peer.name in CONVERTED:
        raise ValueError(
            f"--peer {peer.name}: expected a --peer-model after it, the checkpoint in this system's format"
        )
    if peer.model is not None:
        check_peer_model(peer.model, model, dtype)


def _workloads(options: argparse.Namespace) -> dict[WorkloadName, list[BenchRequest]]:
    names: tuple[WorkloadName, ...] = ("w", "lone") if options.workload == "both" else (options.workload,)
    counts = {"w": options.requests, "lone": _LONE_REQUESTS}
    return {name: draw(name, options.shape.vocabulary, counts[name]) for name in names}


def _prepare(options: argparse.Namespace, folder: Path) -> Work:
    workloads = _workloads(options)
    room = max(kv_cache_tokens(rs, len(rs) if name == "w" else 1) for name, rs in workloads.items())
    path = folder / "requests.json"
    path.write_text(
        json.dumps(
            {
                name: [{"prompt": r.prompt, "max_tokens": r.num_output_tokens} for r in requests]
                for name, requests in workloads.items()
            }
        )
    )
    return Work(options.model, path, options.dtype, options.threads, room, options.timeout)


# ---------------------------------------------------------------------- runs


class Progress:
    """Prints the progress of the runs to stderr, with an estimate of the remaining time."""

    def __init__(self, sides: Sequence[str], num_rounds: int) -> None:
        self._left = [side for _ in range(num_rounds) for side in sides]
        self._total = len(self._left)
        self._taken_s: dict[str, list[float]] = {}

    def starts(self, number: int, side: str) -> None:
        """Print that a run is about to start."""
        count = self._total - len(self._left) + 1
        left = "" if not self._taken_s else f", about {self.left_s() / 60:.0f} min left"
        print(f"round {number}: {side} (run {count} of {self._total}{left})", file=sys.stderr, flush=True)

    def has_run(self, side: str, seconds: float) -> None:
        """Record that a run has ended, and its duration."""
        self._left.remove(side)
        self._taken_s.setdefault(side, []).append(seconds)

    def gives_up(self, side: str) -> None:
        """Exclude a side from further runs."""
        self._left = [each for each in self._left if each != side]
        self._total = len(self._left) + sum(map(len, self._taken_s.values()))

    def left_s(self) -> float:
        """Estimate the seconds of all remaining runs.

        A side that has not run yet counts as the mean of the others.
        """
        means = {side: statistics.mean(taken) for side, taken in self._taken_s.items()}
        typical = statistics.mean(means.values())
        return sum(means.get(side, typical) for side in self._left)


def _rounds(sides: Sequence[Side], work: Work, shape: ModelShape, num_rounds: int) -> Iterator[Run]:
    """Run every side in every round, this package first. A side that hangs is not run again."""
    progress, given_up = Progress([side.name for side in sides], num_rounds), set()
    for number in range(1, num_rounds + 1):
        for side in sides:
            if side.name in given_up:
                continue
            progress.starts(number, side.name)
            begun = time.monotonic()
            printed, done = _run_side(side, work, shape, number)
            progress.has_run(side.name, time.monotonic() - begun)
            if printed.has_hung:
                given_up.add(side.name)
                progress.gives_up(side.name)
            yield done


def _run_side(side: Side, work: Work, shape: ModelShape, number: int) -> tuple[Printed, Run]:
    """Run a side and print a line of its figures.

    Memory bandwidth is measured just before and just after the run.
    """
    before = read_gb_per_s(work.threads)
    printed = run(side, work)
    after = read_gb_per_s(work.threads)
    if side.name == OURS:
        print(printed.warnings, end="", file=sys.stderr)  # for example, that compiled code cannot be used
    head = {"round": number, "side": side.name}
    head["memory_gb_per_s"] = {"before": round(before, 1), "after": round(after, 1)}
    if printed.figures is None:
        print(json.dumps(head | {"failed": printed.failure}), flush=True)
        return printed, Run(side.name, {})
    figures = {**printed.figures} | weigh(printed.figures, shape, work.dtype)
    print(json.dumps(head | figures | head), flush=True)  # the keys of `head` are first, with its values
    return printed, Run(side.name, values_of(figures, round(after, 1)), figures)


def weigh(figures: Mapping[str, object], shape: ModelShape, dtype: str) -> dict[str, int]:
    """Return the bytes of the weights and of the KV cache, and the remaining bytes of the peak memory."""
    cache, peak = figures.get("kv_cache"), figures.get("peak_rss_bytes")
    if not isinstance(cache, Mapping) or not isinstance(peak, int):
        return {}
    weights, keys_and_values = (
        shape.weight_bytes(dtype),
        shape.kv_cache_bytes(cache["tokens"], cache["value_bytes"]),
    )
    return {
        "weight_bytes": weights,
        "kv_cache_bytes": keys_and_values,
        "beyond_bytes": peak - weights - keys_and_values,
    }


if __name__ == "__main__":
    sys.exit(main())
