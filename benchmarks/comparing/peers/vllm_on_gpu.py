"""Measure vLLM for `scripts/bench gpu`, in this process by its `LLM` class, scheduler included.

Reads the requested measurements as JSON from standard input, and prints the figures by name as the last
line. An iteration's time is the time to generate n tokens minus the time to generate one, divided by n - 1.
"""

from __future__ import annotations

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    asked = json.load(sys.stdin)
    load, rows = asked["load"], asked["rows"]
    longest = max(
        asked["context"] + asked["iterations"] + 2, *(len(r["prompt"]) + r["max_tokens"] for r in load)
    )
    dtype = asked["dtype"]
    quantization = {"quantization": "fp8", "dtype": "bfloat16"} if dtype == "fp8" else {"dtype": dtype}
    if dtype == "int8":
        sys.exit("vLLM does not quantize to int8 while it loads")
    llm = LLM(
        model=asked["model"],
        max_model_len=longest,
        max_num_seqs=max(rows),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **quantization,
    )

    def seconds(prompts: list, counts: list) -> float:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in counts
        ]
        begun = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begun

    numbers, figures, count = random.Random(0), {}, asked["iterations"]
    for size in rows:
        prompts = [[numbers.randrange(10, 500) for _ in range(asked["context"])] for _ in range(size)]
        seconds(prompts, [2] * size)
        first = seconds(prompts, [1] * size)
        took = (seconds(prompts, [1 + count] * size) - first) / count
        figures[f"iteration, {size} rows of {asked['context']}"] = 1e3 * took
    prompts, counts = [r["prompt"] for r in load], [r["max_tokens"] for r in load]
    took = seconds(prompts, counts)
    figures[f"load L, {len(load)} requests"] = sum(counts) / took
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
