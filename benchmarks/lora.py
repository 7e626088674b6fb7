"""Measure the cost of LoRA adapters: iterations with adapters, alternating with iterations without adapters.

All linear layers are adapted. Weights are random, because only the time is measured. In generation every row
has one token, and rows use the adapters in turn; with `--chunk N` one row computes N tokens of a context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring.options import new_parser
from inflight.adapters.lora_modules import SPLIT_MODULES, module_sizes
from inflight.arguments import positive, whole
from inflight.config import EngineConfig
from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer, StoredAdapter
from inflight.core.request.request import Request
from inflight.core.schedule.batch import AdapterLoad, ContextChunk, ScheduledBatch, SlotStart
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.models import DecoderConfig
from inflight.testing.make_model import SHAPES, make_model

_TOKENS_PER_BLOCK = 32
_TOKEN_ID = 7


def random_adapter(decoder: DecoderConfig, rank: int) -> StoredAdapter:
    """Make an adapter of this rank on every linear layer, in bfloat16."""
    sizes = {module: size for module, size in module_sizes(decoder, 0).items() if module in SPLIT_MODULES}
    config = tuple((int(module), layer, rank) for layer in range(decoder.num_layers) for module in sizes)
    width = rank * max(size.inner + size.outer for size in sizes.values())
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(len(config), width, generator=generator).mul_(0.01).bfloat16()
    data = RawBuffer(numbers.view(torch.uint8).numpy().reshape(-1).data)
    matrix = Matrix((len(config), width), "bfloat16", data)
    return StoredAdapter(1, bytes(16), 1, rank, LoraWeights(matrix, config))


class Bench:
    """An engine with two sets of sequences: with adapters, and without.

    Args:
        engine: Engine with slots for both sets.
        num_rows: Number of sequences per set.
        num_adapters: Number of adapters, which the first set's rows use in turn.
        rank: Rank of every adapter.
        num_tokens: Size of the KV cache per sequence, in tokens.
    """

    def __init__(
        self, engine: ModelEngine, num_rows: int, num_adapters: int, rank: int, num_tokens: int
    ) -> None:
        self._engine = engine
        self._num_rows = num_rows
        self._iteration = 0
        self.load_ms: list[float] = []
        adapter = random_adapter(engine.decoder_config, rank)
        num_pages = engine.limits.adapter_pages(rank)
        pages = [range(n * num_pages, (n + 1) * num_pages) for n in range(num_adapters)]
        for each in pages:
            begun = time.perf_counter()
            self._run(adapter_loads=(AdapterLoad(adapter, tuple(each)),))
            self.load_ms.append(1e3 * (time.perf_counter() - begun))
        per_slot = -(-num_tokens // _TOKENS_PER_BLOCK)
        slots = range(2 * num_rows)
        firsts = [pages[slot % num_adapters][0] if slot < num_rows else -1 for slot in slots]
        self._run(
            starts=tuple(
                SlotStart(slot, Request(slot, (_TOKEN_ID,), num_tokens), adapter=first)
                for slot, first in zip(slots, firsts)
            ),
            new_blocks=tuple((slot, tuple(range(slot * per_slot, (slot + 1) * per_slot))) for slot in slots),
        )

    def begin(self, prompt_length: int) -> None:
        """Start all sequences as if all prompt tokens except the last were cached."""
        chunks = [
            ContextChunk(slot, prompt_length - 1, (_TOKEN_ID,), True) for slot in range(2 * self._num_rows)
        ]
        self._run(context=tuple(chunks))

    def compute(self, has_adapters: bool, num_tokens: int) -> None:
        """Compute a context of `num_tokens` tokens in one sequence of a set."""
        slot = self._slots(has_adapters)[0]
        self._run(context=(ContextChunk(slot, 0, (_TOKEN_ID,) * num_tokens, False),))

    def generate(self, has_adapters: bool) -> None:
        """Compute one token of every sequence of one set."""
        self._run(generation_slots=tuple(self._slots(has_adapters)))

    def _slots(self, has_adapters: bool) -> range:
        return range(self._num_rows) if has_adapters else range(self._num_rows, 2 * self._num_rows)

    def _run(self, **changes: object) -> None:
        batch = ScheduledBatch(self._iteration, **changes)  # type: ignore[arg-type]
        self._iteration += 1
        self._engine.decode(batch, self._engine.forward(batch))


@contextmanager
def _load(options: argparse.Namespace, num_tokens: int) -> Iterator[ModelEngine]:
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        model = options.model or str(make_model(Path(folder), shape=options.shape))
        tokens = -(-num_tokens // _TOKENS_PER_BLOCK) * _TOKENS_PER_BLOCK
        engine = load_engine(
            EngineConfig(
                model,
                options.dtype,
                kernels=options.kernels,
                max_num_sequences=2 * options.rows,
                max_sequence_length=tokens,
                max_num_tokens=max(2048, options.chunk),
                tokens_per_block=_TOKENS_PER_BLOCK,
                max_tokens_in_paged_kv_cache=2 * options.rows * tokens,
                engine_threads=options.threads,
            )
        )
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Turn:
    """Average time of an iteration in one turn, in milliseconds."""

    wall_ms: float
    processor_ms: float


def measure(bench: Bench, options: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    """Measure every round, with adapters and without; return (turns with adapters, turns without)."""
    bench.begin(options.prompt)
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    for number in range(options.rounds + 1):
        for has_adapters in (True, False) if number % 2 else (False, True):
            turns[has_adapters].append(_take_turn(bench, has_adapters, options))
    return turns[True][1:], turns[False][1:]  # the first round warms up


def _take_turn(bench: Bench, has_adapters: bool, options: argparse.Namespace) -> Turn:
    begun = time.perf_counter(), time.process_time()
    for _ in range(options.turn):
        if options.chunk:
            bench.compute(has_adapters, options.chunk)
        else:
            bench.generate(has_adapters)
    ended = time.perf_counter(), time.process_time()
    wall_s, processor_s = (after - before for before, after in zip(begun, ended))
    return Turn(1e3 * wall_s / options.turn, 1e3 * processor_s / options.turn)


def summarize(adapted: list[Turn], plain: list[Turn], tokens: int) -> dict[str, float | list[float]]:
    """Return the figures: ratios of tokens/s, and of processor times, which depend less on other programs."""
    ratios = [bare.wall_ms / own.wall_ms for own, bare in zip(adapted, plain)]
    of_processor = [bare.processor_ms / own.processor_ms for own, bare in zip(adapted, plain)]
    fastest = min(turn.wall_ms for turn in plain) / min(turn.wall_ms for turn in adapted)
    return {
        "with_tokens_per_s": round(1e3 * tokens / statistics.median(turn.wall_ms for turn in adapted), 1),
        "without_tokens_per_s": round(1e3 * tokens / statistics.median(turn.wall_ms for turn in plain), 1),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": np.percentile(ratios, [25, 75]).round(3).tolist(),
        "ratio_of_fastest": round(fastest, 3),
        "ratio_of_processor_time": round(statistics.median(of_processor), 3),
    }


def main() -> None:
    parser = new_parser("lora", __doc__)
    parser.add_argument("--model", help="checkpoint folder; default: random weights of a shape")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", choices=("native", "torch"), help="default: the engine's choice")
    parser.add_argument("--threads", type=positive, help="threads of the forward pass")
    parser.add_argument("--rows", type=positive, default=32, help="rows of an iteration")
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--prompt", type=positive, default=128, help="initial tokens of each sequence")
    parser.add_argument("--chunk", type=whole, default=0, help="tokens of a context; 0: generation")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument(
        "--turn", type=positive, default=3, help="iterations of a turn, before the other set's"
    )
    options = parser.parse_args()
    num_tokens = max(options.chunk, options.prompt + (options.rounds + 1) * options.turn + 1)
    with _load(options, num_tokens) as engine, torch.inference_mode():
        bench = Bench(engine, options.rows, options.adapters, options.rank, num_tokens)
        figures = summarize(*measure(bench, options), options.chunk or options.rows)
        kernels, load_ms = engine.kernels, round(statistics.median(bench.load_ms), 1)
    print(
        f"{figures['with_tokens_per_s']} tokens/s with adapters, {figures['without_tokens_per_s']} without\n"
        f"ratio {figures['ratio']}, quartiles {figures['quartiles']}, of the fastest turns "
        f"{figures['ratio_of_fastest']}, of processor time {figures['ratio_of_processor_time']}\n"
        f"an adapter is loaded in {load_ms} ms"
    )
    setup = {
        "shape": options.model or options.shape, "dtype": options.dtype, "kernels": kernels, "rows": options.rows,
        "adapters": options.adapters, "rank": options.rank, "chunk": options.chunk, "rounds": options.rounds,
    }  # fmt: skip
    print(json.dumps({"bench": "lora", **setup, "load_ms": load_ms, **figures}))


if __name__ == "__main__":
    main()
