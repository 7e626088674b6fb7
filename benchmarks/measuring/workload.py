"""The workload of `offline`, `serve` and `compare`: the same requests for every system, drawn from a seed.

Token ids are random, so that prompts have no common prefix. Requests are greedy, and no token ends a
sequence, so that every system generates the same number of tokens. Imports only the standard library,
because it is also used where this package is not installed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WorkloadName = Literal["w", "lone"]

_FIRST_TOKEN = 10  # lower ids are usually special tokens
_PROMPT_LENGTHS = (32, 512)
_OUTPUT_LENGTHS = (16, 128)
_LONE_PROMPT, _LONE_OUTPUT = 128, 64
_SEED, _LONE_SEED = 1234, 77


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Token ids of a prompt, and the number of tokens to generate."""

    prompt: tuple[int, ...]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and output together."""
        return len(self.prompt) + self.num_output_tokens


def draw(name: WorkloadName, vocab_size: int, count: int) -> list[BenchRequest]:
    """Return the first `count` requests of a workload. The requests do not depend on `count`."""
    return draw_w(vocab_size, count) if name == "w" else draw_lone(vocab_size, count)


def draw_w(vocab_size: int, count: int) -> list[BenchRequest]:
    """Draw log-uniform prompts of 32 to 512 tokens, and uniform outputs of 16 to 128 tokens."""
    numbers = random.Random(_SEED)
    return [_draw_one(numbers, vocab_size) for _ in range(count)]


def draw_lone(vocab_size: int, count: int) -> list[BenchRequest]:
    """Draw prompts of 128 tokens and outputs of 64 tokens, for requests that run alone."""
    numbers = random.Random(_LONE_SEED)
    return [BenchRequest(_draw_tokens(numbers, _LONE_PROMPT, vocab_size), _LONE_OUTPUT) for _ in range(count)]


def warm_up(requests: Sequence[BenchRequest], concurrency: int) -> Sequence[BenchRequest]:
    """Return the requests to run before timing: all, or only one if requests run one after another.

    Some systems do extra work whenever a batch has a new shape.
    """
    return requests[:1] if concurrency == 1 else requests


def _draw_one(numbers: random.Random, vocab_size: int) -> BenchRequest:
    shortest, longest = _PROMPT_LENGTHS
    num_prompt_tokens = round(math.exp(numbers.uniform(math.log(shortest), math.log(longest))))
    num_output_tokens = numbers.randint(*_OUTPUT_LENGTHS)
    return BenchRequest(_draw_tokens(numbers, num_prompt_tokens, vocab_size), num_output_tokens)


def _draw_tokens(numbers: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(_FIRST_TOKEN, vocab_size) for _ in range(count))
