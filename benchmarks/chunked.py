"""Measure how much a long prompt delays the streams that are running, with and without chunked context.

Runs in this process, without a server. N streams generate when a prompt of 2,000 tokens arrives. Without
`enable_chunked_context` one iteration computes the whole prompt, and every stream waits for it. With it,
streams have precedence, and the prompt gets the rest of `max_num_tokens`. The gaps between a stream's tokens
are measured from the arrival until the prompt's first token. With two prompts at a time, the two chunking
policies are compared.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import dataclass

from benchmarks.long_context import Loop, add_engine_options, load_engine, random_tokens
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import ChunkingPolicy, SchedulingConfig
from inflight.core.request.request import Request
from inflight.engine.engine import ModelEngine

_STREAM_PROMPT = 64
_PLAIN_ITERATIONS = 8  # before every arrival


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, and the number of prompts that arrive at once."""

    name: str
    config: SchedulingConfig
    num_prompts: int


def cases(num_streams: int, prompt_length: int, chunk: int) -> list[Case]:
    """Return the cases: a whole prompt, a chunked one, and two chunked prompts with either chunking policy."""

    def chunked(policy: ChunkingPolicy) -> SchedulingConfig:
        return SchedulingConfig(
            max_num_tokens=chunk,
            enable_chunked_context=True,
            context_chunking_policy=policy,
            enable_kv_cache_reuse=False,
        )

    whole = SchedulingConfig(max_num_tokens=2 * prompt_length + num_streams, enable_kv_cache_reuse=False)
    first_come = chunked(ChunkingPolicy.FIRST_COME_FIRST_SERVED)
    return [
        Case("whole", whole, 1),
        Case("chunked", first_come, 1),
        Case("two, whole", whole, 2),
        Case("two, first come", first_come, 2),
        Case("two, equal progress", chunked(ChunkingPolicy.EQUAL_PROGRESS), 2),
    ]


class Streams:
    """Streams that run through a whole case, and the gaps between their tokens.

    Attributes:
        gaps_s: Gaps in seconds. The caller clears the list.
    """

    def __init__(self, loop: Loop, count: int, vocab_size: int, new_tokens: int) -> None:
        self._loop = loop
        self._last_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.step(
            *(
                Request(number, random_tokens(number, _STREAM_PROMPT, vocab_size), new_tokens, streaming=True)
                for number in range(count)
            )
        )
        while len(self._last_s) < count:
            self.step()

    def step(self, *requests: Request) -> dict[int, float]:
        """Run one iteration; return the end times of other requests that ended in it, by id."""
        responses = self._loop.step(*requests)
        now_s = time.perf_counter()
        ended = {}
        for response in responses:
            if response.result is None or not response.result.num_output_tokens[0]:
                continue
            if response.request_id in self._last_s:
                self.gaps_s.append(now_s - self._last_s[response.request_id])
            if response.is_final:
                ended[response.request_id] = now_s
            else:
                self._last_s[response.request_id] = now_s
        return ended


def measure(engine: ModelEngine, case: Case, num_streams: int, prompt_length: int, rounds: int) -> dict:
    """Return the gaps over all rounds, and medians of the prompts' times to first token, in milliseconds."""
    vocab_size = engine.limits.vocab_size
    streams = Streams(
        Loop(engine, case.config),
        num_streams,
        vocab_size,
        engine.limits.max_sequence_length - _STREAM_PROMPT,
    )
    numbers = itertools.count(num_streams)
    plain_s: list[float] = []
    waited_s: list[float] = []
    first_tokens_s: list[list[float]] = []
    for _ in range(rounds):
        streams.gaps_s.clear()
        for _ in range(_PLAIN_ITERATIONS):
            streams.step()
        plain_s += streams.gaps_s
        streams.gaps_s.clear()
        ids = [next(numbers) for _ in range(case.num_prompts)]
        prompts = [Request(i, random_tokens(i, prompt_length, vocab_size), 1) for i in ids]
        arrived_s = time.perf_counter()
        ended = streams.step(*prompts)
        while len(ended) < len(ids):
            ended |= streams.step()
        waited_s += streams.gaps_s
        first_tokens_s.append([ended[i] - arrived_s for i in ids])
    return {
        "case": case.name,
        "gap_ms": {name: _ms(value) for name, value in _percentiles(waited_s).items()},
        "plain_gap_ms": _ms(statistics.median(plain_s)),
        "first_token_ms": [_ms(statistics.median(times)) for times in zip(*first_tokens_s)],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"p50": ordered[round(0.5 * last)], "p99": ordered[round(0.99 * last)], "max": ordered[-1]}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def main() -> None:
    parser = new_parser("chunked", __doc__)
    add_engine_options(parser)
    parser.add_argument(
        "--streams", type=positive, default=8, help="streams that run when the prompt arrives"
    )
    parser.add_argument("--prompt", type=positive, default=2000, help="tokens of the prompt")
    parser.add_argument("--chunk", type=positive, default=256, help="max_num_tokens with chunked context")
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    count, prompt = options.streams, options.prompt
    rows = []
    with load_engine(options, count + 2, 2 * prompt + count, (count + 2) * 8192) as engine:
        for case in cases(count, prompt, options.chunk):
            rows.append(measure(engine, case, count, prompt, options.rounds))
            gap = rows[-1]["gap_ms"]
            print(
                f"{case.name:20} gap p50 {gap['p50']:7.1f}  p99 {gap['p99']:7.1f}  max {gap['max']:7.1f} ms "
                f"(plain {rows[-1]['plain_gap_ms']:5.1f} ms)  first token after "
                + ", ".join(f"{each:.1f} ms" for each in rows[-1]["first_token_ms"])
            )
    setup = {"streams": count, "prompt": prompt, "chunk": options.chunk, "dtype": options.dtype}
    print(json.dumps({"bench": "chunked", **setup, "rows": rows}))


if __name__ == "__main__":
    main()
