"""Measure a mixture of experts: its speed compared with the memory bandwidth, and its router's time.

Runs generation iterations on compiled layers. The sequences begin differently, so that their tokens use
different experts. An iteration reads every matrix once, but of the experts only those that a row uses; the
layers count them. Without `--model`, weights are random, and about a billion of them are active. The router
then chooses experts nearly evenly, which is also the aim of training.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring.bandwidth import Probe
from benchmarks.measuring.options import new_parser
from benchmarks.measuring.report import Bandwidth, medians
from benchmarks.measuring.setup import ModelShape
from inflight.arguments import positive
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.scheduler import Scheduler
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.models import DecoderConfig
from inflight.testing.make_model import Shape, make_model, num_weights

FAMILY = "qwen3_moe"
SHAPE = Shape(16, 2048, 32, 4, 768, 128_256, 8192, 1e6, experts=24, experts_per_token=8)
"""2.23 billion weights, of which 1.02 billion are active. Width and number of active experts as in
Qwen3-30B-A3B."""
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_WARM_UP = 2  # iterations
_SEED = 3


@dataclass(frozen=True, slots=True)
class Iterations:
    """Measurements of generation iterations, all with the same number of rows.

    Attributes:
        seconds: Seconds of each iteration.
        routing_s: Seconds of routing, over all iterations.
        experts_read: Number of experts read, over all layers and iterations.
    """

    seconds: list[float]
    routing_s: float
    experts_read: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one round, or medians of several rounds with the same number of rows.

    Attributes:
        tokens_per_s: Tokens per second of the median iteration.
        iteration_ms: Milliseconds of the median iteration.
        experts_read: Mean number of experts that a layer reads in an iteration.
        gigabytes_read: Gigabytes of weights that an iteration reads.
        memory_gb_per_s: Memory bandwidth before and after the round.
        share: Speed as a fraction of the speed at which the mean bandwidth could read the same bytes.
        router_share: The router's time as a fraction of the time of all iterations.
    """

    rows: int
    tokens_per_s: float
    iteration_ms: float
    experts_read: float
    gigabytes_read: float
    memory_gb_per_s: Bandwidth
    share: float
    router_share: float


def bytes_read(config: DecoderConfig, dtype: str, experts_read: float) -> float:
    """Return the bytes of weights that an iteration reads if it reads `experts_read` experts in each layer."""
    experts = config.experts
    assert experts is not None, "the model has experts"
    shape = ModelShape.of(config)
    of_expert = 3 * config.hidden_size * experts.intermediate_size
    more = sum(experts.layers) * of_expert * (experts_read - experts.num_per_token)
    return _BYTES[dtype] * (shape.layer_weights + shape.head_weights + more)


def summarize(
    config: DecoderConfig, dtype: str, rows: int, run: Iterations, memory_gb_per_s: Bandwidth
) -> Figures:
    """Summarize the iterations of a round."""
    assert config.experts is not None, "the model has experts"
    median = statistics.median(run.seconds)
    experts_read = run.experts_read / len(run.seconds) / sum(config.experts.layers)
    gigabytes = bytes_read(config, dtype, experts_read) / 1e9
    return Figures(
        rows,
        tokens_per_s=rows / median,
        iteration_ms=1e3 * median,
        experts_read=experts_read,
        gigabytes_read=gigabytes,
        memory_gb_per_s=memory_gb_per_s,
        share=gigabytes / median / statistics.mean((memory_gb_per_s.before, memory_gb_per_s.after)),
        router_share=run.routing_s / sum(run.seconds),
    )


def generate(engine: ModelEngine, decoder: NativeDecoder, rows: int, prompt: int, count: int) -> Iterations:
    """Run `count` iterations of `rows` rows after random prompts of `prompt` tokens, in one batch."""
    numbers = random.Random(_SEED)
    scheduler = Scheduler(SchedulingConfig(enable_kv_cache_reuse=False), engine.limits)
    vocab_size, num_tokens = engine.limits.vocab_size, 1 + _WARM_UP + count
    prompts = [tuple(numbers.randrange(3, vocab_size) for _ in range(prompt)) for _ in range(rows)]
    requests = tuple(Request(number, ids, num_tokens) for number, ids in enumerate(prompts))
    scheduler.accept(IterationInput(0, 1, requests))
    seconds: list[float] = []
    routed = [decoder.routed()]
    while (batch := scheduler.schedule()) is not None:
        begun = time.perf_counter()
        output = engine.decode(batch, engine.forward(batch))
        seconds.append(time.perf_counter() - begun)
        routed.append(decoder.routed())
        scheduler.update(batch, output)
    before, after = routed[-1 - count], routed[-1]
    return Iterations(seconds[-count:], (after.ns - before.ns) / 1e9, after.experts - before.experts)


@contextmanager
def _load(options: argparse.Namespace, rows: int) -> Iterator[tuple[ModelEngine, NativeDecoder]]:
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        model = options.model or str(make_model(Path(folder), FAMILY, SHAPE))
        engine = load_engine(
            EngineConfig(
                model,
                options.dtype,
                kernels="native",
                max_num_sequences=rows,
                max_sequence_length=options.prompt + options.iterations + _WARM_UP + 1,
                max_num_tokens=rows * options.prompt,
                engine_threads=options.threads,
            )
        )
    decoder = engine.runner.decoder
    assert isinstance(decoder, NativeDecoder), "kernels is native"
    try:
        yield engine, decoder
    finally:
        engine.close()


def main() -> None:
    parser = new_parser("experts", __doc__)
    parser.add_argument("--model", help="checkpoint folder; random weights without one")
    parser.add_argument("--dtype", choices=_BYTES, default="bfloat16")
    parser.add_argument("--threads", type=positive, default=2, help="threads of the forward pass")
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 4, 16], help="rows of an iteration")
    parser.add_argument("--prompt", type=positive, default=32, help="initial tokens of each sequence")
    parser.add_argument("--iterations", type=positive, default=16, help="iterations of a round")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds; figures are their medians")
    options = parser.parse_args()
    with Probe(options.threads) as probe, _load(options, max(options.rows)) as (engine, decoder):
        config = engine.decoder_config
        if config.experts is None:
            sys.exit(f"{parser.prog}: {options.model} has no experts")
        figures = []
        for rows in options.rows:
            rounds = []
            for _ in range(options.rounds):
                before = probe.gb_per_s()
                run = generate(engine, decoder, rows, options.prompt, options.iterations)
                memory = Bandwidth(before, probe.gb_per_s())
                rounds.append(summarize(config, options.dtype, rows, run, memory))
            found = medians(rounds)
            figures.append(found)
            memory = found.memory_gb_per_s
            print(
                f"{rows:3} rows  {found.tokens_per_s:7.1f} tokens/s  {found.iteration_ms:7.2f} ms  "
                f"{found.experts_read:5.1f} experts a layer  {found.gigabytes_read:5.2f} GB read  "
                f"{100 * found.share:5.1f} % of what {(memory.before + memory.after) / 2:.1f} GB/s allow  "
                f"router {100 * found.router_share:.2f} %"
            )
    setup = {
        "model": options.model or f"{num_weights(FAMILY, SHAPE) / 1e9:.2f} billion at random",
        "dtype": options.dtype,
        "threads": options.threads,
        "prompt": options.prompt,
        "rounds": options.rounds,
    }
    print(json.dumps({"bench": "experts", **setup, "figures": [asdict(each) for each in figures]}))


if __name__ == "__main__":
    main()
