"""Measure how often an EAGLE-3 head or a checkpoint's own head guesses right, and what drafts gain or cost.

Runs in this process, without a server: for each number of streams, equally many requests at once through scheduler
and engine, without drafts, with drafts by the head, and with drafts by a wrong EAGLE-3 head, whose output
projection is negated. The last one shows what useless drafts cost. A scheduler is used for all rounds, as in a
server, so a useless head is tried in fewer and fewer of them. The generated tokens are compared; in float32,
a difference is an error. `scripts/train_draft_head` trains a head for the demo model. Without --draft-model, the
checkpoint's own head drafts (MTP); one with random weights is never right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.measuring.drafts import DraftedRun
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.checkpoint_config import read_config_file
from inflight.config import EngineConfig, SchedulingConfig, Speculation
from inflight.core.request.request import IterationInput, OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.text.tokenizer import Tokenizer

_DEMO_MODEL = Path(__file__).resolve().parents[1] / "model_repository/tensorrt_llm/1/demo_model"
_VERBS = ("read", "write", "parse", "format", "open", "check", "find", "encode")
_NOUNS = ("header(line, default=None)", "lines(path)", "name(self)", "value(self, index)")
PROMPTS = tuple(f"def {verb}_{noun}:\n" for noun in _NOUNS for verb in _VERBS)


@dataclass(frozen=True, slots=True)
class StreamsRun(DraftedRun):
    """Measurement of requests at once, which took `seconds`."""

    seconds: float


def run(engine: ModelEngine, requests: Sequence[Request], scheduler: Scheduler) -> StreamsRun:
    """Generate all requests at once on the engine."""
    num_iterations = 0
    begin = time.perf_counter()
    responses = scheduler.accept(IterationInput(0, 0, tuple(requests)))
    while (batch := scheduler.schedule()) is not None:
        responses += scheduler.update(batch, engine.decode(batch, engine.forward(batch)))
        num_iterations += 1
    seconds = time.perf_counter() - begin
    found: dict[int, SequenceResult] = {}
    for response in responses:
        if response.error is not None:
            raise response.error
        if response.result is not None:
            found[response.request_id] = response.result
    return StreamsRun(tuple(found[request.request_id] for request in requests), num_iterations, seconds)


@contextlib.contextmanager
def wrong_head(folder: str) -> Iterator[str]:
    """Write a head with a negated output projection, which guesses the unlikeliest tokens; remove it again."""
    with tempfile.TemporaryDirectory(prefix="inflight-wrong-head-") as target:
        shutil.copy(Path(folder, "config.json"), target)
        tensors = load_file(Path(folder, "model.safetensors"))
        tensors["lm_head.weight"] = -tensors["lm_head.weight"]
        save_file(tensors, Path(target, "model.safetensors"))
        yield target


def measure(
    engines: dict[str, ModelEngine], requests: Sequence[Request], drafts: Speculation, rounds: int
) -> list[dict]:
    """Return a row for each engine with medians over `rounds`; the engines take turns.

    `to_plain` has the quartiles of the speed divided by the plain engine's speed in the same round. Ratios are
    taken within a round, because the speed of a shared machine changes between rounds.
    """
    schedulers = {
        name: Scheduler(
            SchedulingConfig(
                enable_kv_cache_reuse=False,
                speculative_decoding_mode=drafts if name.endswith("head") else None,
            ),
            engine.limits,
        )
        for name, engine in engines.items()
    }
    runs = {name: list[StreamsRun]() for name in engines}
    for name, engine in engines.items():
        run(engine, requests, schedulers[name])  # warms up
    for _ in range(rounds):
        for name, engine in engines.items():
            runs[name].append(run(engine, requests, schedulers[name]))
    speeds = {
        name: [
            sum(result.num_output_tokens[0] for result in each.results) / each.seconds for each in measured
        ]
        for name, measured in runs.items()
    }
    rows = []
    for name, (first, *_) in runs.items():
        same = first.tokens == runs["plain"][0].tokens
        if not same and engines[name].dtype == "float32":
            raise AssertionError(f"{name} changed the tokens")
        rows.append(
            {
                "streams": len(requests),
                "method": name,
                "tokens_per_s": round(statistics.median(speeds[name])),
                "to_plain": [round(quartile, 3) for quartile in _quartiles(speeds[name], speeds["plain"])],
            }
            | first.row(runs["plain"][0])
        )
    return rows


def _quartiles(speeds: Sequence[float], plain: Sequence[float]) -> list[float]:
    ratios = list(map(operator.truediv, speeds, plain))
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def _read_arguments() -> argparse.Namespace:
    parser = new_parser("draft_head", __doc__)
    parser.add_argument(
        "--draft-model", metavar="DIR", help="folder of the EAGLE-3 head; default: the checkpoint's own"
    )
    parser.add_argument("--model", default=str(_DEMO_MODEL), help="checkpoint folder with a tokenizer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--kernels", default=None, help="implementation of the model's layers")
    parser.add_argument("--threads", type=positive, default=None, help="threads of the forward pass")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--tokens", type=positive, default=128, help="new tokens of each request")
    parser.add_argument("--draft", type=positive, default=3, help="most tokens of a draft")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--ignore-cost", action="store_true", help="draft even where the head cannot save time"
    )
    return parser.parse_args()


def main() -> None:
    arguments = _read_arguments()

    def load(head: str | None = None, has_own: bool = False) -> ModelEngine:
        engine = load_engine(
            EngineConfig(
                arguments.model,
                arguments.dtype,
                device=arguments.device,
                max_num_sequences=max(arguments.streams),
                max_tokens_in_paged_kv_cache=max(arguments.streams) * (arguments.tokens + 128),
                engine_threads=arguments.threads,
                kernels=arguments.kernels,
                draft_head_dir=head,
                has_draft_head=has_own,
            )
        )
        if arguments.ignore_cost:
            engine.limits = replace(engine.limits, guess_cost=0.0)
        return engine

    has_own = arguments.draft_model is None
    if not has_own:
        read_config_file(arguments.draft_model)  # raises ConfigError without a head
    drafts = Speculation(Speculation.MTP if has_own else Speculation.EAGLE3, arguments.draft)
    tokenizer = Tokenizer.from_dir(arguments.model)
    output = OutputOptions(return_perf_metrics=True, exclude_input_from_output=True)
    rows = []
    with contextlib.ExitStack() as stack:
        engines = {"plain": load(), "head": load(arguments.draft_model, has_own)}
        if not has_own:
            engines["wrong head"] = load(stack.enter_context(wrong_head(arguments.draft_model)))
        for count in arguments.streams:
            prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
            requests = [
                Request(
                    number,
                    tuple(tokenizer.encode(prompt)),
                    arguments.tokens,
                    sampling=SamplingConfig(temperature=arguments.temperature, random_seed=number)
                    if arguments.temperature
                    else SamplingConfig(),
                    output=output,
                )
                for number, prompt in enumerate(prompts)
            ]
            for row in measure(engines, requests, drafts, arguments.rounds):
                rows.append(row)
                print(row)
    print(json.dumps({"bench": "draft_head", "dtype": arguments.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
