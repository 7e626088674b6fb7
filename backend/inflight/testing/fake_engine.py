"""A device whose KV cache holds digests: every position stores a digest of the whole prefix up to it.

A row's next token is a digest of everything its block table holds, so any slip in scheduling (a wrong block, a
block shared too early or freed too soon, a token computed twice or not at all) changes the tokens, and
`expected_tokens` says what they should have been. Pure Python, no model, deterministic. Loop thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.core.batch import ContextChunk, EngineLimits, ModelOutput, ScheduledBatch, SlotStart
from inflight.core.sampling_config import SamplingConfig

_EMPTY = 0  # what an unwritten position holds


def _digest(prefix: Sequence[int], token_id: int) -> int:
    # hash() of a tuple of ints is the same in every process; a broken digest only weakens the fake.
    return hash((*prefix, token_id)) or 1


def _choose(digest: int, sampling: SamplingConfig, position: int, vocab_size: int) -> int:
    key = 0 if sampling.greedy else sampling.random_seed + 1
    return hash((digest, key, position if key else 0)) % vocab_size


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    sampling: SamplingConfig | None = None,
    attend_to_all: bool = True,
) -> list[int]:
    """The first `num_tokens` tokens of a sequence that has the device to itself."""
    cache: list[int] = []
    generated: list[int] = []

    def feed(token_id: int) -> None:
        cache.append(_digest(cache if attend_to_all else cache[-1:], token_id))

    for token_id in prompt:
        feed(token_id)
    while len(generated) < num_tokens:
        generated.append(_choose(cache[-1], sampling or SamplingConfig(), len(cache), vocab_size))
        feed(generated[-1])
    return generated


@dataclass(slots=True)
class _Slot:
    start: SlotStart
    block_table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    last_token: int = -1


class FakeEngine:
    """Implements `inflight.core.ports.Engine`.

    Args:
        limits: What it declares.
        seconds_per_step: Time that a forward pass takes, slept.
        attend_to_all: Read every position of the prefix, as attention does, or (cheap: cost independent of
            the length) only the one before.
    """

    def __init__(
        self, limits: EngineLimits, seconds_per_step: float = 0.0, attend_to_all: bool = True
    ) -> None:
        self._limits = limits
        self._seconds_per_step = seconds_per_step
        self._attend_to_all = attend_to_all
        self._cache = [[_EMPTY] * limits.tokens_per_block for _ in range(limits.num_blocks)]
        self._slots: dict[int, _Slot] = {}

    @property
    def limits(self) -> EngineLimits:
        """As given."""
        return self._limits

    def forward(self, batch: ScheduledBatch) -> list[int]:
        """Apply the deltas, compute every row; returns the digest of each sampled row."""
        self._apply(batch)
        if self._seconds_per_step:
            time.sleep(self._seconds_per_step)
        digests = [self._run_chunk(chunk) for chunk in batch.context]
        sampled = [digest for digest, chunk in zip(digests, batch.context) if chunk.is_last]
        for slot in batch.generation_slots:
            row = self._slots[slot]
            sampled.append(self._run_token(row, row.last_token))
        return sampled

    def decode(self, batch: ScheduledBatch, logits: list[int]) -> ModelOutput:
        """Turn digests into tokens and feed each back to its slot."""
        tokens = []
        for slot, digest in zip(batch.sampled_slots(), logits):
            row = self._slots[slot]
            row.last_token = _choose(digest, row.start.sampling, row.num_tokens, self._limits.vocab_size)
            tokens.append((row.last_token,))
        return ModelOutput(batch.iteration, tokens)

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._cache.clear()

    def _apply(self, batch: ScheduledBatch) -> None:
        for slot in batch.released_slots:
            self._slots.pop(slot, None)
        for start in batch.starts:
            assert start.slot not in self._slots, f"slot {start.slot} is taken"
            self._slots[start.slot] = _Slot(start)
        for slot, block_ids in batch.new_blocks:
            self._slots[slot].block_table.extend(block_ids)

    def _run_chunk(self, chunk: ContextChunk) -> int:
        row = self._slots[chunk.slot]
        assert chunk.start >= row.num_tokens, f"slot {chunk.slot} goes back to position {chunk.start}"
        row.num_tokens = chunk.start
        digest = _EMPTY
        for token_id in chunk.token_ids:
            digest = self._run_token(row, token_id)
        return digest

    def _run_token(self, row: _Slot, token_id: int) -> int:
        size, position = self._limits.tokens_per_block, row.num_tokens
        if self._attend_to_all:
            held = [digest for block_id in row.block_table for digest in self._cache[block_id]]
            prefix: Sequence[int] = held[:position]
        elif position:
            prefix = (self._cache[row.block_table[(position - 1) // size]][(position - 1) % size],)
        else:
            prefix = ()
        digest = _digest(prefix, token_id)
        self._cache[row.block_table[position // size]][position % size] = digest
        row.num_tokens += 1
        return digest
