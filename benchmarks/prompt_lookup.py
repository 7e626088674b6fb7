"""Measure how much time drafting by prompt lookup saves for a repetitive prompt.

Runs in this process, without a server: one request at a time through scheduler and engine, alternately
without and with `prompt_lookup_num_tokens`. Two prompts are repetitive Python code, which the demo model
continues greedily. The third is one line, which is continued by sampling and repeats little. The generated
tokens are compared; in float32, a difference is an error.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measuring.options import new_parser
from inflight.config import EngineConfig, SchedulingConfig
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
PROMPTS: dict[str, tuple[str, SamplingConfig]] = {
    "accessors": (_PROPERTIES, _GREEDY),
    "tests": (_TESTS, _GREEDY),
    "sampled": ("def parse_header(line, default=None):\n", _SAMPLED),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Measurement of one request: tokens per second after the first token, and number of iterations."""

    result: SequenceResult
    tokens_per_second: float
    num_iterations: int


def run(engine: ModelEngine, request: Request) -> Run:
    """Generate a request alone on the engine, without prefix reuse."""
    scheduler = Scheduler(SchedulingConfig(enable_kv_cache_reuse=False), engine.limits)
    responses = scheduler.accept(IterationInput(0, 0, (request,)))
    first_token = 0.0
    num_iterations = 0
    while (batch := scheduler.schedule()) is not None:
        responses += scheduler.update(batch, engine.decode(batch, engine.forward(batch)))
        first_token = first_token or time.perf_counter()
        num_iterations += 1
    seconds = time.perf_counter() - first_token
    last = responses[-1]
    if last.error is not None:
        raise last.error
    assert last.result is not None, "a response without an error has a result"
    return Run(last.result, (last.result.num_output_tokens[0] - 1) / seconds, num_iterations)


def measure(engine: ModelEngine, plain: Request, num_draft: int, rounds: int) -> dict:
    """Return medians over `rounds`, alternately with and without prompt lookup."""
    looking = replace(plain, prompt_lookup_num_tokens=num_draft)
    run(engine, looking)  # warms up
    pairs = [(run(engine, plain), run(engine, looking)) for _ in range(rounds)]
    before, after = pairs[0]
    speeds = [statistics.median(pair[which].tokens_per_second for pair in pairs) for which in (0, 1)]
    same = before.result.output_token_ids == after.result.output_token_ids
    if not same and engine.dtype == "float32":
        raise AssertionError("prompt lookup changed the tokens")
    metrics = after.result.perf_metrics
    assert metrics is not None, "they were asked for"
    return {
        "prompt_tokens": plain.prompt_length,
        "new_tokens": after.result.num_output_tokens[0],
        "draft": num_draft,
        "plain_tokens_per_s": round(speeds[0]),
        "lookup_tokens_per_s": round(speeds[1]),
        "speed_up": round(speeds[1] / speeds[0], 2),
        "iterations": after.num_iterations,
        "drafted": metrics.num_draft_tokens,
        "accepted": metrics.num_accepted_draft_tokens,
        "accepted_rate": round(metrics.num_accepted_draft_tokens / max(1, metrics.num_draft_tokens), 2),
        "same_tokens": same,
    }


def main() -> None:
    parser = new_parser("prompt_lookup", __doc__)
    parser.add_argument("--model", default=str(_DEMO_MODEL), help="checkpoint folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=None, help="threads of the forward pass")
    parser.add_argument("--prompt", default=None, help="file with another prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    parser.add_argument("--draft", type=int, nargs="+", default=[4, 8], help="prompt_lookup_num_tokens")
    parser.add_argument("--rounds", type=int, default=5)
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
    prompts = {"file": (Path(arguments.prompt).read_text(), _GREEDY)} if arguments.prompt else PROMPTS
    output = OutputOptions(return_perf_metrics=True, exclude_input_from_output=True)
    rows = []
    for name, (text, sampling) in prompts.items():
        prompt = tuple(tokenizer.encode(text))
        request = Request(0, prompt, arguments.tokens, sampling=sampling, output=output)
        for num_draft in arguments.draft:
            rows.append({"prompt": name} | measure(engine, request, num_draft, arguments.rounds))
            print(rows[-1])
    print(json.dumps({"bench": "prompt_lookup", "dtype": engine.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
