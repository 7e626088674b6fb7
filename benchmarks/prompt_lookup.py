"""Measure the time that prompt lookup and suffix decoding save with repetitive prompts.

Runs in this process, without a server: one request at a time through scheduler and engine, in turn without
drafts and with both methods. Two prompts are repetitive Python code, which the demo model continues greedily.
The third is one line, which is continued by sampling and repeats little. `similar` are four requests whose answers
resemble each other, one after the other. The generated tokens are compared; in float32, a difference is an error.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.drafts import DraftedRun
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import EngineConfig, SchedulingConfig, Speculation
from inflight.core.request.request import IterationInput, OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.text.tokenizer import Tokenizer

_DEMO_MODEL = Path(__file__).resolve().parents[1] / "model_repository/tensorrt_llm/1/demo_model"
_FIELDS = ("name", "value", "parent", "index")
_PROPERTIES = "class Node:\n" + "".join(
    f"    def get_{field}(self):\n        return self._{field}\n\n"
    f"    def set_{field}(self, {field}):\n        self._{field} = {field}\n\n"
    for field in _FIELDS
)
_TESTS = "class TestNode(unittest.TestCase):\n" + "".join(
    f"    def test_{field}(self):\n        node = Node()\n        node.set_{field}(1)\n"
    f"        self.assertEqual(node.get_{field}(), 1)\n\n"
    for field in _FIELDS
)
_GREEDY = SamplingConfig()
_SAMPLED = SamplingConfig(temperature=1.0, top_p=0.95, random_seed=1)
PROMPTS: dict[str, tuple[tuple[str, ...], SamplingConfig]] = {
    "accessors": ((_PROPERTIES,), _GREEDY),
    "tests": ((_TESTS,), _GREEDY),
    "sampled": (("def parse_header(line, default=None):\n",), _SAMPLED),
    "similar": (tuple(f"def parse_{field}(self, line):\n" for field in _FIELDS), _GREEDY),
}
METHODS = ("plain", "lookup", "suffix")


@dataclass(frozen=True, slots=True)
class Run(DraftedRun):
    """Measurement of some requests, with tokens per second after each first token."""

    tokens_per_second: float


def run(engine: ModelEngine, requests: Sequence[Request], speculation: Speculation | None) -> Run:
    """Generate requests one after the other on the engine, without prefix reuse."""
    config = SchedulingConfig(enable_kv_cache_reuse=False, speculative_decoding_mode=speculation)
    scheduler = Scheduler(config, engine.limits)
    results: list[SequenceResult] = []
    seconds, num_iterations = 0.0, 0
    for request in requests:
        responses = scheduler.accept(IterationInput(0, 0, (request,)))
        first_token = 0.0
        while (batch := scheduler.schedule()) is not None:
            responses += scheduler.update(batch, engine.decode(batch, engine.forward(batch)))
            first_token = first_token or time.perf_counter()
            num_iterations += 1
        seconds += time.perf_counter() - first_token
        last = responses[-1]
        if last.error is not None:
            raise last.error
        assert last.result is not None, "a response without an error has a result"
        results.append(last.result)
    num_tokens = sum(result.num_output_tokens[0] - 1 for result in results)
    return Run(tuple(results), num_iterations, num_tokens / seconds)


def measure(engine: ModelEngine, requests: Sequence[Request], num_draft: int, rounds: int) -> list[dict]:
    """Return a row for each method with medians over `rounds`; the methods take turns."""
    speculations = (
        None,
        Speculation(Speculation.PROMPT_LOOKUP, num_draft),
        Speculation(Speculation.SUFFIX, num_draft),
    )
    run(engine, requests, speculations[-1])  # warms up
    runs = [[run(engine, requests, each) for each in speculations] for _ in range(rounds)]
    speeds = [statistics.median(each.tokens_per_second for each in column) for column in zip(*runs)]
    plain = runs[0][0]
    rows = []
    for method, speed, measured in zip(METHODS, speeds, runs[0], strict=True):
        if measured.tokens != plain.tokens and engine.dtype == "float32":
            raise AssertionError(f"{method} changed the tokens")
        rows.append(
            {
                "method": method,
                "draft": num_draft,
                "new_tokens": sum(result.num_output_tokens[0] for result in measured.results),
                "tokens_per_s": round(speed),
                "speed_up": round(speed / speeds[0], 2),
            }
            | measured.row(plain)
        )
    return rows


def main() -> None:
    parser = new_parser("prompt_lookup", __doc__)
    parser.add_argument("--model", default=str(_DEMO_MODEL), help="checkpoint folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=positive, default=None, help="threads of the forward pass")
    parser.add_argument("--prompt", default=None, help="file with another prompt")
    parser.add_argument("--tokens", type=positive, default=256, help="new tokens")
    parser.add_argument("--draft", type=positive, nargs="+", default=[4, 8], help="tokens of a draft")
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    engine = load_engine(
        EngineConfig(
            arguments.model,
            arguments.dtype,
            device=arguments.device,
            max_num_sequences=1,
            engine_threads=arguments.threads,
        )
    )
    tokenizer = Tokenizer.from_dir(arguments.model)
    prompts = {"file": ((Path(arguments.prompt).read_text(),), _GREEDY)} if arguments.prompt else PROMPTS
    output = OutputOptions(return_perf_metrics=True, exclude_input_from_output=True)
    rows = []
    for name, (texts, sampling) in prompts.items():
        requests = [
            Request(at, tuple(tokenizer.encode(text)), arguments.tokens, sampling=sampling, output=output)
            for at, text in enumerate(texts)
        ]
        for num_draft in arguments.draft:
            for row in measure(engine, requests, num_draft, arguments.rounds):
                rows.append({"prompt": name} | row)
                print(rows[-1])
    print(json.dumps({"bench": "prompt_lookup", "dtype": engine.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
