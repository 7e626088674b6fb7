"""Code shared by the benchmarks of long prompts: a model with enough positions, and a loop without threads."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.arguments import positive
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.scheduler import Scheduler
from inflight.engine import load
from inflight.engine.engine import ModelEngine
from inflight.testing.make_model import Shape, make_model

_DEMO_WITH_ROOM = Shape(4, 256, 4, 2, 512, 3072, 8192, 10_000.0)
"""The demo model's sizes, but with more positions. Weights are random, because only the time is measured."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `load_engine` reads."""
    parser.add_argument(
        "--model", help="checkpoint folder; default: random weights of the demo model's sizes"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default="auto", help="the parameter of config.pbtxt")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=positive, default=None, help="threads of the forward pass")


@contextmanager
def load_engine(
    options: argparse.Namespace, max_num_sequences: int, max_num_tokens: int, max_tokens_in_kv_cache: int
) -> Iterator[ModelEngine]:
    """Load an engine for the duration of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        model = options.model or str(make_model(Path(folder), shape=_DEMO_WITH_ROOM))
        engine = load.load_engine(
            EngineConfig(
                model,
                options.dtype,
                device=options.device,
                max_num_sequences=max_num_sequences,
                max_num_tokens=max_num_tokens,
                max_tokens_in_paged_kv_cache=max_tokens_in_kv_cache,
                engine_threads=options.threads,
                kv_cache_dtype=options.kv_cache_dtype,
            )
        )
        try:
            yield engine
        finally:
            engine.close()


class Loop:
    """A scheduler and an engine that run one iteration at a time."""

    def __init__(self, engine: ModelEngine, config: SchedulingConfig) -> None:
        self._engine = engine
        self._scheduler = Scheduler(config, engine.limits)
        self._iteration = 0

    def step(self, *requests: Request) -> list[Response]:
        """Run one iteration in which these requests arrive. Raises the error of a failed request."""
        now_ns = time.monotonic_ns()
        responses = self._scheduler.accept(IterationInput(self._iteration, now_ns, requests))
        self._iteration += 1
        batch = self._scheduler.schedule()
        if batch is not None:
            output = self._engine.decode(batch, self._engine.forward(batch))
            responses += self._scheduler.update(batch, output, time.monotonic_ns())
        for response in responses:
            if response.error is not None:
                raise response.error
        return responses


def random_tokens(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    """Return `count` random token ids, which depend on `seed`."""
    return tuple(random.Random(seed).choices(range(vocab_size), k=count))
