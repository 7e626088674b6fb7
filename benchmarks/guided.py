"""What following guides costs: masks for many rows beside a forward pass, and what others notice of a slow guide.

The first part follows a JSON schema in every row, with a made-up vocabulary, and times what an iteration does for
it: filling the masks, banning what they do not have, and going on with the tokens that were chosen. Beside it
stands the time of an iteration of a model of random weights. In the second part a request streams while others'
guides, which take longer to compile than they may, are compiled in vain: the gaps between its tokens with them and
without.
"""

from __future__ import annotations

import itertools
import json
import queue
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.device import Workload, iteration_seconds
from benchmarks.measuring.options import new_parser
from inflight.batch_manager import GptManager
from inflight.config import EngineConfig, SchedulerConfig
from inflight.core.request.guide import Guide, GuideType
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.schedule.batch import ScheduledBatch, SlotStart
from inflight.core.scheduler import Scheduler
from inflight.decoding import Decoding
from inflight.engine.torch import TorchEngine
from inflight.guided.backend import BACKENDS, make_backend
from inflight.guided.compiler import ChildCompiler, GuideBounds
from inflight.guided.grammars import Grammars
from inflight.guided.vocabulary import GuideVocabulary
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
_GUIDE = Guide(GuideType.JSON_SCHEMA, json.dumps(_SCHEMA))


def made_up_vocabulary(vocab_size: int) -> GuideVocabulary:
    """All bytes, and texts of two to eight letters, a third of them behind a space."""
    numbers = np.random.default_rng(0)
    tokens = {bytes([each]): None for each in range(256)}
    while len(tokens) < vocab_size:
        text = bytes(numbers.choice(list(_LETTERS), numbers.integers(2, 9)).tolist())
        tokens[b" " + text if numbers.random() < 0.3 else text] = None
    return GuideVocabulary(tuple(tokens)[:vocab_size], frozenset())


def mask_milliseconds(name: str, num_rows: int, vocab_size: int, steps: int) -> dict[str, float]:
    """Milliseconds that `Decoding.decode` takes with and without guides, by step: median and 99th percentile."""
    vocabulary = made_up_vocabulary(vocab_size)
    begun = time.perf_counter()
    backend = make_backend(name, vocabulary)
    figures = {"start_ms": 1e3 * (time.perf_counter() - begun)}
    begun = time.perf_counter()
    compiled = backend.compile(_GUIDE)
    figures["compile_ms"] = 1e3 * (time.perf_counter() - begun)
    grammars = Grammars(backend, vocabulary)
    grammars.add(_GUIDE, compiled)
    for key, guide in (("guided", _GUIDE), ("plain", None)):
        seconds = _decode_seconds(grammars, guide, num_rows, vocab_size, steps)
        figures[f"{key}_ms"] = 1e3 * statistics.median(seconds)
        figures[f"{key}_p99_ms"] = 1e3 * float(np.percentile(seconds, 99))
    figures["guides_ms"] = figures["guided_ms"] - figures["plain_ms"]
    return {key: round(value, 2) for key, value in figures.items()}


def _decode_seconds(
    grammars: Grammars, guide: Guide | None, num_rows: int, vocab_size: int, steps: int
) -> list[float]:
    """Greedy rows whose logits are drawn anew in every step, so that texts go everywhere a guide lets them."""
    decoding = Decoding(num_rows, steps + 2, vocab_size, torch.device("cpu"), grammars=grammars)
    slots = tuple(range(num_rows))
    starts = tuple(SlotStart(slot, Request(slot, (0,), steps + 1, guide=guide), 0, (0,)) for slot in slots)
    batch = ScheduledBatch(0, starts=starts, generation_slots=slots)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    seconds: list[float] = []
    for step in range(steps):
        logits = noise.roll(977 * step, dims=-1).contiguous()
        decoding.apply(batch)
        begun = time.perf_counter()
        decoding.decode(batch, logits, np.full(num_rows, step + 1))
        seconds.append(time.perf_counter() - begun)
        batch = replace(batch, iteration=step + 1, starts=())
    return seconds[1:]


def forward_milliseconds(shape: str, num_rows: int, dtype: str, device: str | None) -> float:
    """Median milliseconds of an iteration of `num_rows` sequences with 128 tokens of context."""
    workload = Workload((num_rows,), context=128, iterations=8, tokens_per_block=32, copy_bytes=0)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape=SHAPES[shape], dtype="bfloat16")
        config = EngineConfig(
            folder, dtype=dtype, device=device, max_num_sequences=num_rows, max_sequence_length=512
        )
        engine = TorchEngine.load(config)
        seconds = iteration_seconds(engine, workload, num_rows)
        engine.close()
    return 1e3 * statistics.median(seconds)


def gaps_milliseconds(folder: Path, num_slow: int, num_tokens: int) -> list[float]:
    """Milliseconds between the tokens of a stream, while so many slow guides are compiled one after another."""
    found: list[Grammars] = []

    def make_grammars(vocab_size: int) -> Grammars:
        vocabulary = made_up_vocabulary(vocab_size)
        found.append(Grammars(make_backend("llguidance", vocabulary), vocabulary))
        return found[0]

    engine = TorchEngine.load(
        EngineConfig(str(folder), max_tokens_in_paged_kv_cache=4096), make_grammars=make_grammars
    )
    times: queue.SimpleQueue[tuple[float, Response]] = queue.SimpleQueue()
    new: queue.SimpleQueue[Request] = queue.SimpleQueue()
    compiler = ChildCompiler(found[0], "llguidance", GuideBounds(timeout_s=1.0), lambda: manager.notify())
    manager = GptManager(
        engine,
        Scheduler(SchedulerConfig(), engine.limits),
        lambda room: [new.get() for _ in range(new.qsize())],
        lambda response: times.put((time.perf_counter(), response)),
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
    compiler.close()
    manager.shutdown(10)
    return [1e3 * (after - before) for before, after in itertools.pairwise(stream)]


def _slow_guide(number: int) -> Guide:
    """A grammar that stands for twice as much with every rule: minutes."""
    rules = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(1800))
    return Guide(GuideType.EBNF_GRAMMAR, f'root ::= r0\n{rules}\nr1800 ::= "a{number}"')


def _described(gaps: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(float(np.percentile(gaps, 99)), 2),
        "longest_ms": round(max(gaps), 2),
    }


def main() -> None:
    parser = new_parser("guided", __doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--backend", choices=BACKENDS, default="llguidance")
    parser.add_argument("--shape", choices=("none", *SHAPES), default="1b", help="of the forward pass")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="of the forward pass; masks are filled on the host")
    parser.add_argument("--model", type=Path, default=_DEMO_MODEL, help="whose stream is watched")
    parser.add_argument("--tokens", type=int, default=400, help="of that stream")
    parser.add_argument("--slow", type=int, default=8, help="guides that are compiled in vain meanwhile")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"rows": arguments.rows, "vocab": arguments.vocab}
    masks = mask_milliseconds(arguments.backend, arguments.rows, arguments.vocab, arguments.steps)
    print(f"{arguments.rows} rows x {arguments.vocab} tokens, {arguments.backend}: {masks}")
    figures["masks"] = masks
    if arguments.shape != "none":
        forward = forward_milliseconds(arguments.shape, arguments.rows, arguments.dtype, arguments.device)
        share = masks["guides_ms"] / forward
        print(f"an iteration of {arguments.shape}: {forward:.1f} ms; guides are {100 * share:.1f} % of it")
        figures |= {"forward_ms": round(forward, 1), "share": round(share, 4)}
    for count in (0, arguments.slow):
        gaps = _described(gaps_milliseconds(arguments.model, count, arguments.tokens))
        print(f"gaps between tokens while {count} slow guides compile: {gaps}")
        figures[f"gaps_{count}"] = gaps
    print(json.dumps({"bench": "guided", **figures}))


_DEMO_MODEL = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/demo_model"

if __name__ == "__main__":
    main()
