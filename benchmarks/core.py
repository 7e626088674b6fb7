"""Measure, without a device, how long the scheduler takes to admit requests and to handle an iteration.

Outputs are made in advance, so that only the scheduler is timed, without sender threads and forward pass.
Statistics are counted, but not written as JSON. Each kind of request is measured separately.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.config import SchedulingConfig
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import BeamGroup, EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler

_VOCAB_SIZE = 50_000
_TOKENS_PER_BLOCK = 32
_BEAMS = 4
_DRAFTS = 4
_TOKEN = 7

MakeRequest = Callable[[int, int, int], Request]
"""Function that makes a request from (request id, number of prompt tokens, number of new tokens)."""


def _plain(request_id: int, prompt: int, new: int) -> Request:
    return Request(request_id, (_TOKEN,) * prompt, new)


def _streaming(request_id: int, prompt: int, new: int) -> Request:
    return Request(request_id, (_TOKEN,) * prompt, new, streaming=True)


def _beams(request_id: int, prompt: int, new: int) -> Request:
    return Request(request_id, (_TOKEN,) * prompt, new, sampling=SamplingConfig(beam_width=_BEAMS))


def _drafted(request_id: int, prompt: int, new: int) -> Request:
    return Request(request_id, (_TOKEN,) * prompt, new, prompt_lookup_num_tokens=_DRAFTS)


def _answer(batch: ScheduledBatch) -> ModelOutput:
    """Make an output with one token in every row and all drafts accepted. Beams continue other beams in turn."""
    tokens = [(_TOKEN,) * (1 + chunk.num_draft_tokens) for chunk in batch.context if chunk.is_last]
    tokens += [(_TOKEN,)] * len(batch.generation_slots)
    return ModelOutput(batch.iteration, tokens, [_candidates(group) for group in batch.beam_groups])


def _candidates(group: BeamGroup) -> BeamCandidates:
    count, rows = group.num_candidates, len(group.slots)
    best = max(group.scores)
    return BeamCandidates(
        tuple(i // 2 % rows for i in range(count)),
        tuple(_TOKEN + i for i in range(count)),
        tuple(best - 0.01 * i for i in range(1, count + 1)),
    )


def iteration_ms(
    make: MakeRequest, num_requests: int, rows: int, prompt: int, iterations: int
) -> list[float]:
    """Return the milliseconds of each iteration in generation, in order."""
    new = iterations * (_DRAFTS + 2)
    blocks = rows * num_requests * -(-(prompt + new) // _TOKENS_PER_BLOCK)
    limits = EngineLimits(_VOCAB_SIZE, prompt + new, rows * num_requests, blocks, _TOKENS_PER_BLOCK)
    scheduler = Scheduler(SchedulingConfig(max_num_tokens=num_requests * prompt + 8 * rows), limits)
    scheduler.accept(IterationInput(0, 1, tuple(make(i, prompt, new) for i in range(num_requests))))
    for _ in range(3):  # contexts; then beams diverge
        _step(scheduler)
    return [_step(scheduler) for _ in range(iterations)]


def _step(scheduler: Scheduler) -> float:
    begun = time.perf_counter()
    batch = scheduler.schedule()
    scheduled = time.perf_counter()
    assert batch is not None, "nothing ran"
    output = _answer(batch)
    answered = time.perf_counter()
    scheduler.update(batch, output)
    scheduler.stats(batch)
    return (time.perf_counter() - answered + scheduled - begun) * 1e3


def admission_ms(num_requests: int, prompt: int) -> float:
    """Return the milliseconds to accept `num_requests` new requests and schedule the first iteration."""
    limits = EngineLimits(_VOCAB_SIZE, 2 * prompt, num_requests, num_requests * 2 * prompt, _TOKENS_PER_BLOCK)
    scheduler = Scheduler(SchedulingConfig(max_num_tokens=num_requests * prompt), limits)
    requests = tuple(
        Request(i, tuple((i * 31 + k) % _VOCAB_SIZE for k in range(prompt)), prompt)
        for i in range(num_requests)
    )
    begun = time.perf_counter()
    scheduler.accept(IterationInput(0, 1, requests))
    scheduler.schedule()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = new_parser("core", __doc__)
    parser.add_argument("--requests", type=positive, default=256, help="requests that run at a time")
    parser.add_argument("--prompt", type=positive, default=2000, help="initial tokens of each sequence")
    parser.add_argument("--iterations", type=positive, default=300)
    options = parser.parse_args()
    kinds: tuple[tuple[str, MakeRequest, int], ...] = (
        ("greedy", _plain, 1),
        ("greedy, streamed", _streaming, 1),
        (f"beams of {_BEAMS}", _beams, _BEAMS),
        (f"drafts of {_DRAFTS}", _drafted, 1),
    )
    rows = []
    for name, make, width in kinds:
        num_requests = options.requests // width
        short, long = (
            statistics.median(iteration_ms(make, num_requests, width, prompt, options.iterations))
            for prompt in (options.prompt // 20, options.prompt)
        )
        rows.append(
            {"kind": name, "requests": num_requests, "ms": round(long, 3), "ms_short": round(short, 3)}
        )
        print(
            f"{name:18} {num_requests:4} requests  {long:6.3f} ms an iteration "
            f"({short:6.3f} ms with a twentieth of the history)"
        )
    admitted = [admission_ms(1000, 100) for _ in range(5)]
    print(f"admission of 1,000 requests of 100 tokens: {statistics.median(admitted):.1f} ms")
    print(json.dumps({"bench": "core", "rows": rows, "admission_ms": round(statistics.median(admitted), 2)}))


if __name__ == "__main__":
    main()
