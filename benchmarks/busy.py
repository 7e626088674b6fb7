"""Measure the engine's tokens/s with and without busy processes on its cores, for several spin times of threads.

Runs the engine in this process, like `offline`, on cores that it shares with busy loops. The threads of
compiled layers spin for some time at a barrier before they sleep; rounds alternate between different times.
The fair share is the processor time that the operating system gives the engine if it treats all threads and
loops equally.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from benchmarks.measuring.options import Options, add_options, engine_settings, new_parser
from benchmarks.measuring.report import Timeline
from benchmarks.measuring.setup import Versions, cpu_name
from benchmarks.measuring.workload import BenchRequest, draw, warm_up
from benchmarks.offline import InProcess
from inflight.arguments import positive, whole
from inflight.errors import InflightError
from inflight.models import read_model_description
from inflight.processors import Processors

_SPIN_VARIABLE = "INFLIGHT_CPU_SPIN_US"
_LOOP = "print(flush=True)\nwhile True: pass"


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement: output tokens per second, and processors that the engine's process used on average."""

    tokens_per_s: float
    processors: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the rounds with the same time of spinning and the same number of busy loops.

    Attributes:
        spin_us: Microseconds that a thread spins at a barrier before it sleeps.
        loops: Number of busy loops.
        tokens_per_s: Output tokens per second.
        processors: Processors that the engine's process used on average.
        share: Tokens per second divided by the tokens per second without loops.
        fair_share: The expected share if threads and loops get equal processor time.
    """

    spin_us: int
    loops: int
    tokens_per_s: float
    processors: float
    share: float
    fair_share: float


def fair_share(num_processors: int, num_threads: int, num_loops: int) -> float:
    """Return the engine's fair share of the processor time that it uses without busy loops."""
    alone = min(num_threads, num_processors)
    return min(alone, num_processors * num_threads / (num_threads + num_loops)) / alone


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run busy loops on the processors of this process.

    The `with` block begins when all of them run; they end after it.
    """
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def summarize(
    rounds: dict[tuple[int, int], list[Round]], num_processors: int, num_threads: int
) -> list[Figures]:
    """Return the figures of all rounds.

    The keys are (time of spinning in µs, number of loops); 0 loops is required.
    """
    medians = {
        key: Round(
            statistics.median(each.tokens_per_s for each in measured),
            statistics.median(each.processors for each in measured),
        )
        for key, measured in rounds.items()
    }
    return [
        Figures(
            spin_us,
            loops,
            found.tokens_per_s,
            found.processors,
            found.tokens_per_s / medians[spin_us, 0].tokens_per_s,
            fair_share(num_processors, num_threads, loops),
        )
        for (spin_us, loops), found in medians.items()
    ]


def measure(engine: InProcess, requests: Sequence[BenchRequest], concurrency: int) -> Round:
    """Run all requests once."""
    used, begun = _processor_s(), time.perf_counter()
    timelines: list[Timeline] = engine.run(requests, concurrency)
    seconds = time.perf_counter() - begun
    num_tokens = sum(each.num_output_tokens for each in timelines)
    return Round(num_tokens / seconds, (_processor_s() - used) / seconds)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _loaded(options: Options, requests: Sequence[BenchRequest], spin_us: int) -> Iterator[InProcess]:
    os.environ[_SPIN_VARIABLE] = str(spin_us)  # read at the load
    with InProcess(engine_settings(options, requests)) as engine:
        engine.run(warm_up(requests, options.concurrency), options.concurrency)
        yield engine


def main() -> None:
    parser = new_parser("busy", __doc__)
    add_options(parser, concurrency=0)
    parser.add_argument("--processors", type=positive, help="number of processors to use; default: all")
    parser.add_argument(
        "--loops", type=positive, nargs="+", default=[1, 2], help="numbers of busy loops (default: 1 2)"
    )
    parser.add_argument(
        "--spin-us",
        type=whole,
        nargs="+",
        default=[0, 50, 100_000],
        help="microseconds that a thread spins at a barrier before it sleeps; 0: it sleeps at once "
        "(default: 0 50 100000)",
    )
    given = parser.parse_args()
    cpus = Processors.here().cpus[: given.processors]
    os.sched_setaffinity(0, cpus)  # also inherited by threads that this thread starts
    options = Options.of(given)
    try:
        requests = draw(
            options.workload, read_model_description(options.model).decoder.vocab_size, options.num_requests
        )
        rounds: dict[tuple[int, int], list[Round]] = {}
        with ExitStack() as stack:
            engines = {each: stack.enter_context(_loaded(options, requests, each)) for each in given.spin_us}
            for _ in range(options.num_rounds):
                for loops in (0, *given.loops):
                    for spin_us, engine in engines.items():
                        with busy_loops(loops):
                            found = measure(engine, requests, options.concurrency)
                        rounds.setdefault((spin_us, loops), []).append(found)
            kernels = next(iter(engines.values())).kernels
    except InflightError as error:
        sys.exit(f"{parser.prog}: {error}")
    figures = summarize(rounds, len(cpus), options.num_threads)
    for each in figures:
        print(
            f"spin {each.spin_us:6} us  {each.loops} loops  {each.tokens_per_s:7.1f} tokens/s  "
            f"{each.processors:5.2f} processors  share {each.share:.2f} (fair: {each.fair_share:.2f})"
        )
    setup = {
        "model": options.model.name,
        "workload": options.workload,
        "requests": options.num_requests,
        "concurrency": options.concurrency,
        "dtype": options.dtype,
        "kernels": asdict(kernels),
        "threads": options.num_threads,
        "processors": len(cpus),
        "rounds": options.num_rounds,
        "cpu": cpu_name(),
        "versions": asdict(Versions.here()),
    }
    print(json.dumps({"bench": "busy", "figures": [asdict(each) for each in figures], "setup": setup}))


if __name__ == "__main__":
    main()
