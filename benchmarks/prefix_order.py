"""Measure how many prompt tokens are reused if requests with cached prefixes start first (`schedule_policy`).

Simulates the scheduler without any device. Each request has one of several system prompts and a message of its
own; the KV cache is too small for all system prompts. Arrivals are random. The unit of time is the time of one
computed token; every iteration takes 32 of them in addition, as it reads the weights.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass, replace

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive, whole
from inflight.config import SchedulePolicy, SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler

_VOCAB_SIZE = 50_000
_TOKENS_PER_BLOCK = 32
_MESSAGE_TOKENS, _ANSWER_TOKENS = (16, 128), (16, 128)  # of each request, at least and at most
_SLOTS = 8
_MAX_NUM_TOKENS = 512
_WEIGHTS_TOKENS = 32
"""Time to read the weights in an iteration, as the number of tokens that are computed in that time."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests and the cache.

    Attributes:
        requests: Number of requests.
        system_prompts: Number of system prompts.
        system_tokens: Tokens of each system prompt.
        cached_prompts: Size of the KV cache beyond what running requests' own tokens take, in system prompts.
        spacing: Mean time between two arrivals, in tokens computed; 0: all arrive at once.
        seed: Seed of the tokens, lengths and arrivals.
    """

    requests: int
    system_prompts: int
    system_tokens: int
    cached_prompts: int
    spacing: int
    seed: int

    def draw(self) -> list[tuple[int, Request]]:
        """Return the requests in order of arrival, with their times."""
        rng = random.Random(self.seed)
        systems = [_tokens(rng, self.system_tokens) for _ in range(self.system_prompts)]
        arrivals, now = list[tuple[int, Request]](), 0.0
        for number in range(self.requests):
            now += rng.expovariate(1 / self.spacing) if self.spacing else 0.0
            prompt = rng.choice(systems) + _tokens(rng, rng.randint(*_MESSAGE_TOKENS))
            arrivals.append((int(now), Request(number, prompt, rng.randint(*_ANSWER_TOKENS))))
        return arrivals

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks."""
        own = -(-(_MESSAGE_TOKENS[1] + _ANSWER_TOKENS[1]) // _TOKENS_PER_BLOCK) + 1
        return _SLOTS * own + self.cached_prompts * (self.system_tokens // _TOKENS_PER_BLOCK)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a run; times are in tokens.

    Attributes:
        reused: Share of the prompts' tokens that were not computed.
        time: Time of the whole run.
        median, p99, worst: Times to first token.
        overtaken: Highest number of later requests that got their first token before a request.
    """

    reused: float
    time: int
    median: float
    p99: float
    worst: int
    overtaken: int


def run(workload: Workload, config: SchedulingConfig) -> Figures:
    """Run all requests to their end."""
    rng = random.Random(workload.seed)
    arrivals = workload.draw()
    longest = workload.system_tokens + _MESSAGE_TOKENS[1] + _ANSWER_TOKENS[1]
    limits = EngineLimits(_VOCAB_SIZE, longest, _SLOTS, workload.num_blocks, _TOKENS_PER_BLOCK)
    scheduler = Scheduler(config, limits)
    waits: dict[int, int] = {}  # by request id, in order of first tokens
    now = computed = iteration = num_arrived = 0
    while len(waits) < len(arrivals) or scheduler.num_active:
        if not scheduler.num_active:
            now = max(now, arrivals[num_arrived][0])
        first = num_arrived
        while num_arrived < len(arrivals) and arrivals[num_arrived][0] <= now:
            num_arrived += 1
        new = tuple(request for _, request in arrivals[first:num_arrived])
        scheduler.accept(IterationInput(iteration, iteration + 1, new))
        batch = scheduler.schedule()
        assert batch is not None, "nothing ran"
        context = sum(len(chunk.token_ids) for chunk in batch.context)
        computed += context
        now += context + len(batch.generation_slots) + _WEIGHTS_TOKENS
        owners = scheduler.running_sequences
        scheduler.update(batch, _answer(batch, rng))
        for sequence in owners:
            if sequence.num_generated and sequence.request_id not in waits:
                waits[sequence.request_id] = now - arrivals[sequence.request_id][0]
        iteration += 1
    order = list(waits)
    overtaken = max(sum(later > one for later in order[:place]) for place, one in enumerate(order))
    times = sorted(waits.values())
    return Figures(
        reused=1.0 - computed / sum(request.prompt_length for _, request in arrivals),
        time=now,
        median=statistics.median(times),
        p99=times[len(times) * 99 // 100],
        worst=times[-1],
        overtaken=overtaken,
    )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_VOCAB_SIZE) for _ in range(count))


def _answer(batch: ScheduledBatch, rng: random.Random) -> ModelOutput:
    count = sum(chunk.is_last for chunk in batch.context) + len(batch.generation_slots)
    return ModelOutput(batch.iteration, [(rng.randrange(_VOCAB_SIZE),) for _ in range(count)], [])


def configurations(bounds: list[int]) -> dict[str, SchedulingConfig]:
    """Return the configurations to compare: first come, first served, and LPM with each bound of overtaking."""
    common = SchedulingConfig(max_num_tokens=_MAX_NUM_TOKENS, enable_chunked_context=True)
    lpm = {
        f"lpm {bound}": replace(common, schedule_policy=SchedulePolicy.LPM, max_overtaken=bound)
        for bound in bounds
    }
    return {"fcfs": common, **lpm}


def main() -> None:
    parser = new_parser("prefix_order", __doc__)
    parser.add_argument("--requests", type=positive, default=600)
    parser.add_argument("--system-prompts", type=positive, default=8)
    parser.add_argument("--system-tokens", type=positive, default=1024)
    parser.add_argument(
        "--cached-prompts", type=positive, default=3, help="system prompts that the cache can hold"
    )
    parser.add_argument("--spacing", type=whole, nargs="+", default=[0, 400, 600, 900])
    parser.add_argument("--overtaken", type=whole, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seed", type=whole, default=0)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("spacing  policy     reused      time   first token: median       p99     worst   overtaken")
    for spacing in options.spacing:
        workload = Workload(
            options.requests,
            options.system_prompts,
            options.system_tokens,
            options.cached_prompts,
            spacing,
            options.seed,
        )
        for name, config in configurations(options.overtaken).items():
            found = run(workload, config)
            print(
                f"{spacing:7}  {name:9}  {found.reused:6.3f}  {found.time:8}  {found.median:20.0f}  "
                f"{found.p99:8.0f}  {found.worst:8}  {found.overtaken:10}"
            )
            rows.append({"spacing": spacing, "policy": name, **asdict(found)})
    print(json.dumps({"bench": "prefix_order", "rows": rows}))


if __name__ == "__main__":
    main()
