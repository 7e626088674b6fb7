"""Compare a device's generation speed with the limit set by memory bandwidth, and with transformers' speed.

Batches are made without a scheduler or a server: contexts of equal length, then iterations with one token
for each sequence. An iteration must read every weight, key and value once, so its limit is the number of
these bytes divided by the bandwidth of a large copy. Prints one JSON line for each number of sequences.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import EngineConfig
from inflight.core.request.request import Request
from inflight.core.schedule.batch import ContextChunk, ScheduledBatch, SlotStart
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import block_bytes
from inflight.engine.load import load_engine
from inflight.models import DecoderConfig
from inflight.testing.make_model import SHAPES, Shape, make_model

DEVICE_SHAPES = {**SHAPES, "8b": Shape(32, 4096, 32, 8, 14_336, 128_256, 8192, 500_000.0)}
_WARM_UP = 3  # iterations
_COPIES = 5
CONTEXT_TOKENS = 8192  # tokens of a context iteration


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of the measurements.

    Attributes:
        rows: Numbers of sequences; each is a measurement.
        context: Tokens of a sequence before the first timed iteration.
        iterations: Number of timed iterations.
        tokens_per_block: Tokens per KV block.
        copy_bytes: Size in bytes of the copy that measures the bandwidth.
    """

    rows: tuple[int, ...]
    context: int
    iterations: int
    tokens_per_block: int
    copy_bytes: int

    @property
    def length(self) -> int:
        """Tokens of a sequence after the last iteration."""
        return self.context + _WARM_UP + self.iterations + 1

    @property
    def blocks_per_row(self) -> int:
        """KV blocks of a sequence after the last iteration."""
        return -(-self.length // self.tokens_per_block)


def bytes_read(decoder: DecoderConfig, dtype: torch.dtype, num_rows: int, length: float) -> float:
    """Return the bytes of weights, keys and values that an iteration of `num_rows` sequences must read."""
    hidden, mlp = decoder.hidden_size, 3 if decoder.gated_mlp else 2
    layer = hidden * (2 * decoder.query_size + 2 * decoder.kv_size + mlp * decoder.intermediate_size)
    weights = (decoder.num_layers * layer + decoder.vocab_size * hidden) * dtype.itemsize
    return weights + num_rows * length * block_bytes(decoder, 1, dtype)


def copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Return the bytes read and written per second by a copy of `size` bytes, the best of several copies."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(time_of(lambda: target.copy_(source), device) for _ in range(_COPIES))


def iteration_seconds(engine: ModelEngine, workload: Workload, num_rows: int) -> list[float]:
    """Return the seconds of each iteration of `num_rows` sequences.

    With overlapped iterations, an iteration ends when the previous iteration's tokens are on the host.
    """
    seconds = []
    limits = engine.limits
    in_flight: deque[tuple[ScheduledBatch, Any]] = deque()
    for made in batches(workload, num_rows, limits.vocab_size):
        batch = replace(made, samples_on_device=limits.overlaps_iterations)
        begun = time.perf_counter()
        in_flight.append((batch, engine.forward(batch)))
        for _ in range(limits.num_due(len(in_flight), batch)):
            engine.decode(*in_flight.popleft())
        if not batch.context:
            seconds.append(time.perf_counter() - begun)
    for each in in_flight:
        engine.decode(*each)
    return seconds[_WARM_UP:]


def batches(workload: Workload, num_rows: int, vocab_size: int) -> Iterator[ScheduledBatch]:
    """Yield context batches, each with as many contexts as fit, then generation batches."""
    prompts = np.random.default_rng(0).integers(3, vocab_size, (num_rows, workload.context)).tolist()
    together = max(1, CONTEXT_TOKENS // workload.context)
    numbers, size = itertools.count(), workload.blocks_per_row
    for first in range(0, num_rows, together):
        slots = range(first, min(first + together, num_rows))
        starts = [SlotStart(slot, Request(slot, tuple(prompts[slot]), workload.length)) for slot in slots]
        yield ScheduledBatch(
            next(numbers),
            starts=tuple(starts),
            new_blocks=tuple((slot, tuple(range(slot * size, (slot + 1) * size))) for slot in slots),
            context=tuple(ContextChunk(slot, 0, tuple(prompts[slot]), True) for slot in slots),
        )
    for _ in range(_WARM_UP + workload.iterations):
        yield ScheduledBatch(next(numbers), generation_slots=tuple(range(num_rows)))


def measure_engine(config: EngineConfig, workload: Workload) -> list[dict[str, object]]:
    """Return the figures by number of sequences."""
    engine = load_engine(config)
    decoder, dtype = engine.decoder_config, getattr(torch, engine.dtype)
    bandwidth = copy_bytes_per_s(torch.device(config.device or "cpu"), workload.copy_bytes)
    figures: list[dict[str, object]] = []
    for rows in workload.rows:
        seconds = statistics.median(iteration_seconds(engine, workload, rows))
        read = bytes_read(decoder, dtype, rows, workload.context + _WARM_UP + workload.iterations / 2)
        figures.append(
            {
                "rows": rows,
                "tokens_per_s": round(rows / seconds, 1),
                "iteration_ms": round(1e3 * seconds, 3),
                "gb_read": round(read / 1e9, 3),
                "copy_gb_per_s": round(bandwidth / 1e9, 1),
                "of_limit": round(read / bandwidth / seconds, 3),
                "kernels": engine.kernels,
                "recorded": rows in engine.recorded.generation_sizes,
            }
        )
    engine.close()
    return figures


def measure_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, workload: Workload
) -> list[float]:
    """Return tokens/s of greedy `generate`, without its context phase, for each number of sequences."""
    import transformers

    # The declared type of the model has neither `to` nor `generate`.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)
    figures = []
    for rows in workload.rows:
        numbers = np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, workload.context))
        prompts = torch.from_numpy(numbers).to(device)

        def generate(count: int, prompts: torch.Tensor = prompts) -> None:
            mask = torch.ones_like(prompts)
            counts = {"max_new_tokens": count, "min_new_tokens": count}
            model.generate(prompts, attention_mask=mask, do_sample=False, pad_token_id=0, **counts)

        generate(2)
        first = time_of(lambda: generate(1), device)
        seconds = time_of(lambda: generate(1 + workload.iterations), device) - first
        figures.append(round(rows * workload.iterations / seconds, 1))
    return figures


def time_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `run` and its work on the device take."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finish()
    begun = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - begun


def run(folder: Path, workload: Workload, config: EngineConfig, beside: bool) -> list[dict[str, object]]:
    """Print and return a row of figures for each number of sequences."""
    figures = measure_engine(config, workload)
    device = torch.device(config.device or "cpu")
    if beside:
        dtype = getattr(torch, config.dtype or "bfloat16")
        for line, theirs in zip(figures, measure_transformers(folder, dtype, device, workload), strict=True):
            line["transformers_tokens_per_s"] = theirs
    setup = {
        "bench": "device",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": folder.name,
        "dtype": config.dtype,
        "context": workload.context,
        "tokens_per_block": workload.tokens_per_block,
    }
    lines = [{**setup, **line} for line in figures]
    for line in lines:
        print(json.dumps(line))
    return lines


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    parser = new_parser("device", __doc__)
    parser.add_argument(
        "--shape", choices=DEVICE_SHAPES, default="1b", help="shape of the checkpoint of random weights"
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder, instead of random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 32, 256], help="numbers of sequences in a batch"
    )
    parser.add_argument(
        "--context", type=positive, default=512, help="tokens of each sequence before the first iteration"
    )
    parser.add_argument("--iterations", type=positive, default=64)
    parser.add_argument("--tokens-per-block", type=positive, default=32)
    parser.add_argument(
        "--copy-mib", type=positive, default=1024, help="size of the copy that measures the bandwidth"
    )
    parser.add_argument("--without-graphs", action="store_true", help="do not use CUDA graphs")
    parser.add_argument("--without-transformers", action="store_true")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    size: int = given.tokens_per_block
    workload = Workload(tuple(given.rows), given.context, given.iterations, size, given.copy_mib << 20)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.model or Path(temporary) / given.shape
        if given.model is None:
            make_model(folder, shape=DEVICE_SHAPES[given.shape], dtype="bfloat16")
        config = EngineConfig(
            str(folder),
            dtype=given.dtype,
            device=given.device,
            max_num_sequences=max(workload.rows),
            max_num_tokens=max(CONTEXT_TOKENS, workload.context, *workload.rows),
            max_sequence_length=workload.length,
            tokens_per_block=size,
            max_tokens_in_paged_kv_cache=max(workload.rows) * workload.blocks_per_row * size,
            cuda_graph_mode=not given.without_graphs,
        )
        return run(folder, workload, config, not given.without_transformers)


if __name__ == "__main__":
    main()
