"""Measure several ranks on this machine: tokens/s, the time of a broadcast, and the bytes transferred.

Runs `ranks_program` under mpirun: one rank with all threads, then tensor- and pipeline-parallel ranks that
share the same number of threads, alternately for several rounds. Streams have equal length, start at once,
and are greedy; Triton is not used. Counts the bytes that each rank passes to its collectives and its
neighbours, and compares them with the prediction of docs/scaling.md. Imports neither torch nor MPI; the
ranks do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.processors import Processors
from inflight.ranks.launch import find_mpirun, mpirun_options

_SETUPS = ("tp=1,pp=1", "tp=2,pp=1", "tp=1,pp=2")


@dataclass(frozen=True)
class Work:
    """A workload that the ranks run, with `tp` × `pp` ranks of `threads` threads each.

    Each of `streams` sequences has `prompt` prompt tokens and generates `tokens` tokens.
    """

    model: str
    dtype: str
    streams: int
    prompt: int
    tokens: int
    threads: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Figures:
    """Figures of rank 0. A row is one computed token. Logits are gathered for sampled tokens only."""

    tokens_per_s: float
    iterations: float
    broadcast_us: float
    reduced_bytes_per_row: float
    gathered_bytes_per_token: float
    sent_bytes_per_row: float


def main() -> None:
    parser = new_parser("ranks", __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: random weights of --shape")
    parser.add_argument("--shape", choices=("tiny", "135m", "1b"), default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=24, help="tokens to generate per stream")
    threads = Processors.here().num_threads
    parser.add_argument("--threads", type=positive, default=threads, help="threads of all ranks together")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--setups", nargs="+", default=list(_SETUPS), metavar="tp=N,pp=M")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _compare(arguments, str(arguments.model or _make_model(arguments.shape, Path(folder) / "model")))


def _make_model(shape: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "inflight.testing.make_model", "--shape", shape, "--out", str(folder)],
        check=True,
        stdout=sys.stderr,
    )
    return folder


def _compare(arguments: argparse.Namespace, model: str) -> None:
    runs: dict[str, list[Figures]] = {setup: [] for setup in arguments.setups}
    for _ in range(arguments.rounds):
        for setup in arguments.setups:
            runs[setup].append(_start(_work(arguments, model, setup)))
            print(setup, asdict(runs[setup][-1]), flush=True)
    rows = [{"setup": setup, **asdict(_medians(figures))} for setup, figures in runs.items()]
    print(json.dumps({"bench": "ranks", "shape": arguments.shape, "rounds": arguments.rounds, "rows": rows}))


def _work(arguments: argparse.Namespace, model: str, setup: str) -> Work:
    sizes = dict(part.split("=") for part in setup.split(","))
    tp, pp = int(sizes["tp"]), int(sizes["pp"])
    threads = max(1, arguments.threads // (tp * pp))
    size = (arguments.streams, arguments.prompt, arguments.tokens)
    return Work(model, arguments.dtype, *size, threads, tp, pp)


def _medians(runs: Sequence[Figures]) -> Figures:
    return Figures(
        *(statistics.median(getattr(run, field.name) for run in runs) for field in fields(Figures))
    )


def _start(work: Work) -> Figures:
    mpirun = [find_mpirun(), *mpirun_options("", is_one_program=True)]
    program = [sys.executable, "-m", "benchmarks.ranks_program", json.dumps(asdict(work))]
    done = subprocess.run(
        [*mpirun, "-n", str(work.tp * work.pp), *program],
        env={**os.environ, "OMP_NUM_THREADS": str(work.threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Figures(**json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


if __name__ == "__main__":
    main()
