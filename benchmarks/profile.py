"""Measure the stages of iterations, the speed by concurrency and the KV blocks over time; write JSON and plots.

Runs the engine in this process, with the loop, metrics and client that a server uses. Functions of the loop
are timed to divide generation iterations into stages. The workload W runs with more and more requests in
flight, and then twice with a KV cache that has room for half of it: once all requests arrive at the same time,
and once at four fifths of the highest rate that the engine reached. Prints the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring.options import Options, engine_settings, new_parser
from benchmarks.measuring.setup import Setup
from benchmarks.measuring.workload import BenchRequest, draw
from benchmarks.profiling.results import (
    CacheRun,
    IterationCost,
    LoadPoint,
    Profile,
    to_json,
    to_markdown,
)
from benchmarks.profiling.served_engine import ServedEngine
from benchmarks.profiling.stages import watch_loop
from inflight.arguments import output_folder, positive
from inflight.errors import InflightError
from inflight.models import read_model_description
from inflight.testing.make_model import make_model

_PLOTS = Path(__file__).parents[1] / "docs" / "plots"
_ROWS = (1, 8, 32, 64)
_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_MOST = 64  # number of requests in W, and most in flight
_REQUESTS_PER_STREAM = 8  # for few streams; more would only take longer
_PROMPT, _OUTPUT = 128, 96  # of the iterations that are divided into stages
_LOAD = 0.8  # fraction of the rate at which requests can be served
_SEED = 5


def measure(options: Options, setup: Setup, requests: list[BenchRequest]) -> Profile:
    """Measure everything. Takes a few minutes with a model of 135 million parameters."""
    settings = engine_settings(options, requests)
    iterations = _take_apart(settings, setup)
    load = _against_concurrency(settings, requests)
    rate = _LOAD * load[-1].output_tokens_per_s * len(requests) / setup.output_tokens
    return Profile(iterations, load, _over_time(settings, requests, rate), setup)


def _take_apart(settings: dict[str, str], setup: Setup) -> tuple[IterationCost, ...]:
    numbers = random.Random(_SEED)
    prompts = [
        tuple(numbers.randrange(10, setup.shape.vocabulary) for _ in range(_PROMPT)) for _ in range(_MOST)
    ]
    costs = []
    with watch_loop(setup.dtype) as watch, ServedEngine(settings) as engine:
        for rows in (_ROWS[0], *_ROWS):  # the first one warms up
            watch.iterations.clear()
            engine.run([BenchRequest(prompt, _OUTPUT) for prompt in prompts[:rows]], rows)
            costs.append(IterationCost.of(rows, watch.iterations))
    return tuple(costs[1:])


def _against_concurrency(settings: dict[str, str], requests: list[BenchRequest]) -> tuple[LoadPoint, ...]:
    with ServedEngine(settings) as engine:
        engine.run(requests, _MOST)
        return tuple(
            LoadPoint.of(concurrency, engine.run(requests[: _REQUESTS_PER_STREAM * concurrency], concurrency))
            for concurrency in _CONCURRENCY
        )


def _over_time(
    settings: dict[str, str], requests: list[BenchRequest], requests_per_s: float
) -> tuple[CacheRun, ...]:
    half = int(settings["max_tokens_in_paged_kv_cache"]) // 2
    numbers = random.Random(_SEED)
    pauses_s = [numbers.expovariate(requests_per_s) for _ in requests]
    every_iteration = {"max_tokens_in_paged_kv_cache": str(half), "stats_check_period_ms": "1"}
    with ServedEngine(settings | every_iteration) as engine:
        engine.run(requests[:_REQUESTS_PER_STREAM], _REQUESTS_PER_STREAM)
        engine.take_samples()
        engine.run(requests, len(requests))
        at_once = CacheRun(None, engine.num_blocks, tuple(engine.take_samples()))
        engine.run(requests, len(requests), pauses_s)
        return at_once, CacheRun(requests_per_s, engine.num_blocks, tuple(engine.take_samples()))


@contextmanager
def _checkpoint(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        yield make_model(Path(folder) / "135m", shape="135m")


def main() -> None:
    parser = new_parser("profile", __doc__)
    parser.add_argument(
        "--model", type=Path, help="checkpoint folder; default: random weights of the shape 135m"
    )
    parser.add_argument("--dtype", help="default: the checkpoint's")
    parser.add_argument(
        "--out", type=output_folder, default=_PLOTS, help="folder for profile.json and the plots"
    )
    parser.add_argument("--threads", type=positive, help="threads of the forward pass; default: all cores")
    arguments = parser.parse_args()
    try:
        with _checkpoint(arguments.model) as model:
            _run(model, arguments)
    except InflightError as error:
        sys.exit(f"{parser.prog}: {error}")


def _run(model: Path, arguments: argparse.Namespace) -> None:
    from benchmarks.profiling.plots import draw_plots

    given = argparse.Namespace(
        **{**vars(arguments), "model": model, "workload": "w", "requests": _MOST, "concurrency": _MOST},
        kernels=None,
        max_num_tokens=2048,
        rounds=1,
    )
    options = Options.of(given)
    config = read_model_description(model).decoder
    requests = draw("w", config.vocab_size, _MOST)
    setup = Setup.of(options, config, requests)
    profile = measure(options, setup, requests)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "profile.json").write_text(to_json(profile) + "\n", encoding="utf-8")
    draw_plots(profile, arguments.out)
    print(to_markdown(profile))


if __name__ == "__main__":
    main()
