"""Measure how many prompt tokens are reused in conversations, for several numbers of recurrent-state snapshots.

Simulates the scheduler of a model with recurrent layers, without any device. Conversations share a few system
prompts; a random one sends its next message, after all earlier ones, when one of the running answers ends.
There are enough KV blocks for all conversations, so that only snapshots limit the reuse.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive, whole
from inflight.config import SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler

_VOCAB_SIZE = 50_000
_TOKENS_PER_BLOCK = 32
_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 8, 512
_MESSAGE_TOKENS, _ANSWER_TOKENS = (16, 256), (32, 256)  # of each turn, at least and at most
_MAX_SNAPSHOTS = 100_000  # more than are ever saved


@dataclass(frozen=True, slots=True)
class Replay:
    """The workload: conversations of several turns, of which some run at a time.

    Attributes:
        conversations: Number of conversations.
        turns: Messages of each.
        concurrency: Requests that run at a time.
        seed: Seed of the tokens, lengths and order.
    """

    conversations: int
    turns: int
    concurrency: int
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers of prompt tokens, of all requests and of those that were computed."""

    prompt_tokens: int
    computed_tokens: int

    @property
    def reused(self) -> float:
        """Share of the prompts' tokens that were not computed again."""
        return 1.0 - self.computed_tokens / self.prompt_tokens


def replay(workload: Replay, num_snapshots: int, has_state: bool = True) -> Figures:
    """Run all conversations to their end.

    Args:
        workload: The conversations.
        num_snapshots: Number of snapshots.
        has_state: Whether the model has recurrent layers. Without, prefixes are reused whose blocks are cached.
    """
    rng = random.Random(workload.seed)
    prompts = [_tokens(rng, _SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
    histories = [list(rng.choice(prompts)) for _ in range(workload.conversations)]
    turns = [number for number in range(workload.conversations) for _ in range(workload.turns)]
    rng.shuffle(turns)
    longest = _SYSTEM_TOKENS + workload.turns * (_MESSAGE_TOKENS[1] + _ANSWER_TOKENS[1])
    limits = EngineLimits(
        _VOCAB_SIZE,
        longest,
        workload.concurrency,
        workload.conversations * -(-longest // _TOKENS_PER_BLOCK),
        _TOKENS_PER_BLOCK,
        has_state=has_state,
        num_state_snapshots=num_snapshots if has_state else 0,
    )
    config = SchedulingConfig(max_num_tokens=8192, enable_kv_cache_reuse=True, enable_chunked_context=True)
    scheduler = Scheduler(config, limits)
    running: dict[int, int] = {}  # conversation by request id
    prompt_tokens = computed_tokens = iteration = next_id = 0
    while turns or running:
        new: list[Request] = []
        while len(running) < workload.concurrency:
            number = next((each for each in turns if each not in running.values()), None)
            if number is None:
                break
            turns.remove(number)
            histories[number] += _tokens(rng, rng.randint(*_MESSAGE_TOKENS))
            new.append(Request(next_id, tuple(histories[number]), rng.randint(*_ANSWER_TOKENS)))
            prompt_tokens += len(histories[number])
            running[next_id] = number
            next_id += 1
        scheduler.accept(IterationInput(iteration, iteration + 1, tuple(new)))
        batch = scheduler.schedule()
        assert batch is not None, "nothing ran"
        computed_tokens += sum(len(chunk.token_ids) for chunk in batch.context)
        for response in scheduler.update(batch, _answer(batch, rng)):
            assert response.result is not None, "no request fails"
            if response.is_final:
                histories[running.pop(response.request_id)] = list(response.result.output_token_ids[0])
        iteration += 1
    return Figures(prompt_tokens, computed_tokens)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB_SIZE) for _ in range(count)]


def _answer(batch: ScheduledBatch, rng: random.Random) -> ModelOutput:
    count = sum(chunk.is_last for chunk in batch.context) + len(batch.generation_slots)
    return ModelOutput(batch.iteration, [(rng.randrange(_VOCAB_SIZE),) for _ in range(count)], [])


def main() -> None:
    parser = new_parser("snapshots", __doc__)
    parser.add_argument("--conversations", type=positive, default=50)
    parser.add_argument("--turns", type=positive, default=6, help="messages of each conversation")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests that run at a time")
    parser.add_argument("--snapshots", type=whole, nargs="+", default=[0, 8, 16, 32, 48, 64, 96, 128])
    parser.add_argument("--seed", type=whole, default=0)
    options = parser.parse_args()
    workload = Replay(options.conversations, options.turns, options.concurrency, options.seed)
    without_state = replay(workload, 0, has_state=False)
    unlimited = replay(workload, _MAX_SNAPSHOTS)
    rows = {str(number): replay(workload, number) for number in options.snapshots}
    print("snapshots              prompt tokens reused    of the tokens that unlimited snapshots reuse")
    for name, figures in [*rows.items(), ("unlimited", unlimited), ("no recurrent layers", without_state)]:
        print(f"{name:>20}   {figures.reused:20.3f}    {figures.reused / unlimited.reused:20.3f}")
    reused = {name: figures.reused for name, figures in rows.items()}
    print(json.dumps({"bench": "snapshots", "workload": asdict(workload), "reused": reused}))


if __name__ == "__main__":
    main()
