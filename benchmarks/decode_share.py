"""Measure which fraction of an iteration's time is spent on sampling, with a given checkpoint.

All rows sample greedily, then with a temperature, then also with a top_p, and then with all common controls.
"""

from __future__ import annotations

import json
import statistics
import time

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine

_SAMPLINGS = {
    "greedy": SamplingConfig(),
    "temperature": SamplingConfig(temperature=0.8, top_p=1.0),
    "top_p": SamplingConfig(temperature=0.8, top_p=0.9),
    "usual": SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1),
}


def measure(
    engine: ModelEngine, sampling: SamplingConfig, prompt_length: int, num_iterations: int
) -> dict[str, float]:
    """Return medians in milliseconds over generation iterations in which every slot has a sequence."""
    limits = engine.limits
    prompt = tuple((7 * i) % limits.vocab_size for i in range(prompt_length))
    scheduler = Scheduler(SchedulingConfig(enable_kv_cache_reuse=False), limits)
    requests = [
        Request(i, prompt, num_iterations + 1, sampling=sampling) for i in range(limits.max_num_sequences)
    ]
    scheduler.accept(IterationInput(0, 1, tuple(requests)))
    forward_ms, decode_ms = [], []
    while (batch := scheduler.schedule()) is not None:
        begun = time.perf_counter()
        logits = engine.forward(batch)
        computed = time.perf_counter()
        output = engine.decode(batch, logits)
        ended = time.perf_counter()
        scheduler.update(batch, output)
        if len(batch.generation_slots) == limits.max_num_sequences:
            forward_ms.append((computed - begun) * 1e3)
            decode_ms.append((ended - computed) * 1e3)
    forward, decode = statistics.median(forward_ms), statistics.median(decode_ms)
    return {"forward_ms": forward, "decode_ms": decode, "share": decode / (forward + decode)}


def main() -> None:
    parser = new_parser("decode_share", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument(
        "--dtype", default=None, help="float32, bfloat16 or float16; default: the checkpoint's"
    )
    parser.add_argument("--rows", type=positive, default=32)
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of each prompt")
    parser.add_argument("--iterations", type=positive, default=30)
    options = parser.parse_args()
    engine = load_engine(
        EngineConfig(
            gpt_model_path=options.model,
            dtype=options.dtype,
            max_num_sequences=options.rows,
            max_sequence_length=options.prompt + options.iterations + 2,
        )
    )
    figures = {
        name: measure(engine, sampling, options.prompt, options.iterations)
        for name, sampling in _SAMPLINGS.items()
    }
    for name, each in figures.items():
        print(
            f"{name:12} forward {each['forward_ms']:7.2f} ms  decode {each['decode_ms']:6.2f} ms  "
            f"{100 * each['share']:4.1f} % of both"
        )
    setup = {
        "rows": options.rows,
        "prompt": options.prompt,
        "vocab": engine.limits.vocab_size,
        "dtype": engine.dtype,
    }
    print(json.dumps({"bench": "decode_share", **setup, **figures}))


if __name__ == "__main__":
    main()
