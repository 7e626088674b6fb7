"""Measure the time to first token of a prompt whose prefix an earlier request has computed.

Runs in this process, without a server. Prompts share a prefix of 1,000 tokens, one request at a time.
Measures the first request with a prefix, the second request, and the second request without
`enable_kv_cache_reuse`.
"""

from __future__ import annotations

import json
import statistics
import time

from benchmarks.long_context import Loop, add_engine_options, load_engine, random_tokens
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import SchedulingConfig
from inflight.core.request.request import OutputOptions, Request
from inflight.engine.engine import ModelEngine


class Asker:
    """Runs requests for one token, one at a time."""

    def __init__(self, engine: ModelEngine, is_reuse_on: bool, prefix: int, suffix: int) -> None:
        self._loop = Loop(engine, SchedulingConfig(enable_kv_cache_reuse=is_reuse_on))
        self._vocab_size = engine.limits.vocab_size
        self._lengths = prefix, suffix
        self._num_asked = 0

    def first_token_s(self, prefix_seed: int) -> tuple[float, int]:
        """Return the seconds to the first token after a prefix and a new suffix, and the KV blocks reused."""
        prefix, suffix = self._lengths
        self._num_asked += 1
        prompt = random_tokens(prefix_seed, prefix, self._vocab_size)
        prompt += random_tokens(1_000_000 + self._num_asked, suffix, self._vocab_size)
        request = Request(self._num_asked, prompt, 1, output=OutputOptions(return_perf_metrics=True))
        begun = time.perf_counter()
        responses = self._loop.step(request)
        while not responses:
            responses = self._loop.step()
        seconds = time.perf_counter() - begun
        result = responses[-1].result
        assert result is not None and result.perf_metrics is not None
        return seconds, result.perf_metrics.num_reused_blocks


def main() -> None:
    parser = new_parser("reuse", __doc__)
    add_engine_options(parser)
    parser.add_argument("--prefix", type=positive, default=1000, help="tokens of the shared prefix")
    parser.add_argument("--suffix", type=positive, default=16, help="tokens of each suffix")
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    prefix, suffix, rounds = options.prefix, options.suffix, options.rounds
    room = (rounds + 2) * (prefix + suffix + 64)
    with load_engine(options, 1, 8192, room) as engine:
        on, off = (Asker(engine, is_on, prefix, suffix) for is_on in (True, False))
        for asker in (on, off):
            asker.first_token_s(0)  # warms up
        first, second = [], []
        for seed in range(1, rounds + 1):
            first.append(on.first_token_s(seed))
            second.append(on.first_token_s(seed))
        without = [off.first_token_s(seed) for seed in range(1, rounds + 1)]
    rows = {"first": first, "second": second, "reuse_off": without}
    medians = {name: round(statistics.median(s for s, _ in each) * 1e3, 1) for name, each in rows.items()}
    reused = statistics.median(blocks for _, blocks in second)
    for name, median in medians.items():
        print(f"{name:10} {median:8.1f} ms to the first token")
    print(f"the second request reused {reused:.0f} KV blocks")
    setup = {"prefix": prefix, "suffix": suffix, "rounds": rounds, "dtype": options.dtype}
    print(json.dumps({"bench": "reuse", **setup, "first_token_ms": medians, "reused_blocks": reused}))


if __name__ == "__main__":
    main()
