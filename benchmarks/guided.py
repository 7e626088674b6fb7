"""Measure the cost of guided decoding: masks for many rows, and how much slow guides delay other requests.

The first part times an iteration of a model with random weights. The second part samples with this model's
engine and a made-up vocabulary, alternately with and without a JSON schema that every row follows. The
difference is an iteration's work for guides: filling masks, banning tokens, and accepting sampled tokens. In
the third part a request streams while other requests' guides are compiled until they exceed the time limit.
It compares the gaps between the stream's tokens with and without these guides.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.device import Workload, iteration_seconds
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive, whole
from inflight.batch_manager import GptManager
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopSignal
from inflight.core.schedule.batch import ScheduledBatch, SlotStart
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.guided.compiler import ChildCompiler, GuideBounds
from inflight.guided.grammars import GrammarLibrary, Grammars
from inflight.guided.make_backend import BACKENDS, make_backend
from inflight.guided.vocabulary import GuideVocabulary
from inflight.sampling import Sampler
from inflight.sampling.row_kernels import RowKernels
from inflight.testing.make_model import SHAPES, make_model

_LETTERS = b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 {}[]":,.-_'
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["first", "second", "third"]},
        "numbers": {"type": "array", "items": {"type": "number"}},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "numbers", "notes"],
    "additionalProperties": False,
}
_GUIDE = Guide(GuideKind.JSON_SCHEMA, json.dumps(_SCHEMA))


def made_up_vocabulary(vocab_size: int) -> GuideVocabulary:
    """Return a vocabulary of all bytes and of texts of two to eight letters, a third of them after a space."""
    numbers = np.random.default_rng(0)
    tokens = {bytes([each]): None for each in range(256)}
    while len(tokens) < vocab_size:
        text = bytes(numbers.choice(list(_LETTERS), numbers.integers(2, 9)).tolist())
        tokens[b" " + text if numbers.random() < 0.3 else text] = None
    return GuideVocabulary(tuple(tokens)[:vocab_size], frozenset())


def mask_milliseconds(
    name: str, kernels: RowKernels, num_rows: int, vocab_size: int, num_steps: int, num_rounds: int
) -> dict[str, float]:
    """Measure the milliseconds of `Sampler.decode`, alternately with guides and without.

    Returns:
        The times of reading the vocabulary and of compiling the guide; the medians over all rounds of each
        round's median and 99th percentile; and the difference `guides_ms` with its lowest and highest value.
    """
    vocabulary = made_up_vocabulary(vocab_size)
    begun = time.perf_counter()
    backend = make_backend(name, vocabulary)
    figures = {"start_ms": _milliseconds(time.perf_counter() - begun)}
    begun = time.perf_counter()
    compiled = backend.compile(_GUIDE)
    figures["compile_ms"] = _milliseconds(time.perf_counter() - begun)
    grammars = Grammars(lambda: GrammarLibrary(backend, vocabulary))
    grammars.add(_GUIDE, compiled)
    rounds: list[dict[str, float]] = []
    for _ in range(num_rounds):
        took: dict[str, float] = {}
        for key, guide in (("guided", _GUIDE), ("plain", None)):
            seconds = _decode_seconds(grammars, kernels, guide, num_rows, vocab_size, num_steps)
            took[f"{key}_ms"] = _milliseconds(statistics.median(seconds))
            took[f"{key}_p99_ms"] = _milliseconds(float(np.percentile(seconds, 99)))
        took["guides_ms"] = round(took["guided_ms"] - took["plain_ms"], 2)
        print(f"round {len(rounds) + 1}: {took}", flush=True)
        rounds.append(took)
    differences = [took["guides_ms"] for took in rounds]
    medians = {key: round(statistics.median(took[key] for took in rounds), 2) for key in rounds[0]}
    return figures | medians | {"guides_lowest_ms": min(differences), "guides_highest_ms": max(differences)}


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _decode_seconds(
    grammars: Grammars,
    kernels: RowKernels,
    guide: Guide | None,
    num_rows: int,
    vocab_size: int,
    num_steps: int,
) -> list[float]:
    """Return the seconds of greedy decoding. Every step has new random logits, to take all paths of a guide."""
    cpu = torch.device("cpu")
    sampler = Sampler(num_rows, num_steps + 2, vocab_size, cpu, kernels, grammars=grammars)
    slots = tuple(range(num_rows))
    starts = tuple(
        SlotStart(slot, Request(slot, (0,), num_steps + 1, guide=guide), 0, (0,)) for slot in slots
    )
    batch = ScheduledBatch(0, starts=starts, generation_slots=slots)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    seconds: list[float] = []
    for step in range(num_steps):
        logits = noise.roll(977 * step, dims=-1).contiguous()
        sampler.apply(batch)
        begun = time.perf_counter()
        sampler.decode(batch, logits, np.full(num_rows, step + 1))
        seconds.append(time.perf_counter() - begun)
        batch = replace(batch, iteration=step + 1, starts=())
    return seconds[1:]


@contextlib.contextmanager
def loaded_engine(
    shape: str, workload: Workload, dtype: str, device: str | None, kernels: str | None
) -> Iterator[ModelEngine]:
    """Yield an engine of random weights with slots and memory for the workload."""
    (num_rows,) = workload.rows
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape=SHAPES[shape], dtype="bfloat16")
        config = EngineConfig(
            folder,
            dtype=dtype,
            device=device,
            kernels=kernels,
            max_num_sequences=num_rows,
            max_sequence_length=workload.length,
            tokens_per_block=workload.tokens_per_block,
            max_tokens_in_paged_kv_cache=num_rows * workload.blocks_per_row * workload.tokens_per_block,
        )
        engine = load_engine(config)
        try:
            yield engine
        finally:
            engine.close()


def gaps_milliseconds(folder: Path, num_slow: int, num_tokens: int) -> list[float]:
    """Return the milliseconds between a stream's tokens while `num_slow` slow guides are compiled in turn."""
    found: list[Grammars] = []

    def make_grammars(vocab_size: int) -> Grammars:
        vocabulary = made_up_vocabulary(vocab_size)
        library = GrammarLibrary(make_backend("llguidance", vocabulary), vocabulary)
        found.append(Grammars(lambda: library))
        return found[0]

    engine = load_engine(
        EngineConfig(str(folder), max_tokens_in_paged_kv_cache=4096), make_grammars=make_grammars
    )
    times: queue.SimpleQueue[tuple[float, Response]] = queue.SimpleQueue()
    new: queue.SimpleQueue[Request] = queue.SimpleQueue()
    stops: queue.SimpleQueue[StopSignal] = queue.SimpleQueue()
    compiler = ChildCompiler(found[0], "llguidance", GuideBounds(timeout_s=1.0), lambda: manager.notify())
    manager = GptManager(
        engine,
        Scheduler(SchedulingConfig(), engine.limits),
        lambda room: [new.get() for _ in range(new.qsize())],
        lambda response: times.put((time.perf_counter(), response)),
        lambda: [stops.get() for _ in range(stops.qsize())],
        guides=compiler,
    )
    for number in range(num_slow):
        new.put(Request(1 + number, (5,), 4, guide=_slow_guide(number)))
    new.put(Request(0, tuple(range(5, 20)), num_tokens, streaming=True))
    manager.notify()
    stream: list[float] = []
    while True:
        when, response = times.get()
        if response.request_id == 0:
            stream.append(when)
            if response.is_final:
                break
    for number in range(num_slow):
        stops.put(StopSignal(1 + number))
    manager.shutdown(10)
    compiler.close()
    return [1e3 * (after - before) for before, after in itertools.pairwise(stream)]


def _slow_guide(number: int) -> Guide:
    """Return a grammar whose size doubles with every rule, so that it takes minutes to compile."""
    rules = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(1800))
    return Guide(GuideKind.EBNF_GRAMMAR, f'root ::= r0\n{rules}\nr1800 ::= "a{number}"')


def _described(gaps: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(float(np.percentile(gaps, 99)), 2),
        "longest_ms": round(max(gaps), 2),
    }


def main() -> None:
    parser = new_parser("guided", __doc__)
    parser.add_argument("--rows", type=positive, default=64)
    parser.add_argument("--vocab", type=positive, default=128_000)
    parser.add_argument(
        "--steps", type=positive, default=64, help="steps of a round, each with a token for every row"
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, help="rounds with guides and without; figures are their medians"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="llguidance")
    parser.add_argument("--shape", choices=("none", *SHAPES), default="1b", help="shape of the forward pass")
    parser.add_argument(
        "--context", type=positive, default=32, help="tokens of each sequence before the forward pass"
    )
    parser.add_argument(
        "--iterations",
        type=positive,
        default=16,
        help="iterations of the forward pass; the median is printed",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", choices=("native", "torch"), help="default: the engine's choice")
    parser.add_argument("--device", help="device of the forward pass; masks are filled on the host")
    parser.add_argument("--model", type=Path, default=_DEMO_MODEL, help="model of the measured stream")
    parser.add_argument("--tokens", type=positive, default=400, help="tokens of the measured stream")
    parser.add_argument(
        "--slow", type=whole, default=8, help="number of slow guides to compile during the stream"
    )
    arguments = parser.parse_args()
    figures: dict[str, object] = {
        "rows": arguments.rows,
        "vocab": arguments.vocab,
        "backend": arguments.backend,
        "rounds": arguments.rounds,
    }
    sizes = (arguments.rows, arguments.vocab, arguments.steps, arguments.rounds)
    if arguments.shape == "none":
        masks = mask_milliseconds(arguments.backend, RowKernels(), *sizes)
    else:
        workload = Workload((arguments.rows,), arguments.context, arguments.iterations, 32, copy_bytes=0)
        options = (arguments.dtype, arguments.device, arguments.kernels)
        with loaded_engine(arguments.shape, workload, *options) as engine:
            seconds = iteration_seconds(engine, workload, arguments.rows)
            forward = _milliseconds(statistics.median(seconds))
            print(f"an iteration of {arguments.shape}, {engine.kernels}: {forward} ms", flush=True)
            masks = mask_milliseconds(arguments.backend, engine.runner.decoder.row_kernels, *sizes)
            figures |= {"shape": arguments.shape, "kernels": engine.kernels, "forward_ms": forward}
        figures["share"] = round(masks["guides_ms"] / forward, 4)
    figures["masks"] = masks
    print(f"{arguments.rows} rows x {arguments.vocab} tokens, {arguments.backend}: {masks}", flush=True)
    for count in (0, arguments.slow):
        gaps = _described(gaps_milliseconds(arguments.model, count, arguments.tokens))
        print(f"gaps between tokens while {count} slow guides compile: {gaps}", flush=True)
        figures[f"gaps_{count}"] = gaps
    print(json.dumps({"bench": "guided", **figures}))


_DEMO_MODEL = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/demo_model"

if __name__ == "__main__":
    main()
