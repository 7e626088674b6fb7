"""Drives an engine with batches made by hand: slots and blocks are handed out in order, nothing is scheduled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from inflight.core.batch import ContextChunk, ScheduledBatch, SlotStart
from inflight.core.sampling_config import SamplingConfig
from inflight.engine.torch import TorchEngine, TorchEngineConfig

TOKENS_PER_BLOCK = 8


def load_engine(folder: Path, **changes: Any) -> TorchEngine:
    """An engine on the CPU with small blocks."""
    values = {"device": "cpu", "tokens_per_block": TOKENS_PER_BLOCK, "max_num_sequences": 6, **changes}
    return TorchEngine.load(TorchEngineConfig(str(folder), **values))


@dataclass(eq=False)
class Row:
    """What a test knows of one sequence: `tokens` include the sampled ones, `logits` are those of each sample."""

    slot: int
    tokens: list[int]
    prompt_length: int
    start: SlotStart
    blocks: list[int]
    num_computed: int = 0
    num_told: int = 0  # blocks the engine knows of
    logits: list[Tensor] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]


class Driver:
    """One engine, its free slots and its free blocks."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.free_slots = list(range(engine.limits.max_num_sequences))
        self.free_blocks = list(range(engine.limits.num_blocks))
        self._released: list[int] = []
        self._starts: list[SlotStart] = []
        self._iteration = 0

    def start(
        self,
        tokens: Sequence[int],
        sampling: SamplingConfig | None = None,
        sequence_index: int = 0,
        shared_blocks: Sequence[int] = (),
        prompt_length: int | None = None,
    ) -> Row:
        """A sequence in the first free slot, its first tokens in `shared_blocks` already."""
        slot = self.free_slots.pop(0)
        length = len(tokens) if prompt_length is None else prompt_length
        start = SlotStart(slot, 100 + slot, sequence_index, length, sampling or SamplingConfig())
        self._starts.append(start)
        computed = len(shared_blocks) * self.engine.limits.tokens_per_block
        return Row(slot, list(tokens), length, start, list(shared_blocks), computed)

    def release(self, sequence: Row, keep_blocks: int = 0) -> None:
        """Give back its slot and all but its first blocks."""
        self._released.append(sequence.slot)
        self.free_slots.insert(0, sequence.slot)
        self.free_blocks[:0] = sequence.blocks[keep_blocks:]

    def batch(self, chunks: Mapping[Row, int], generation: Sequence[Row]) -> ScheduledBatch:
        """The next batch: so many context tokens of some sequences, one more token of others."""
        context = []
        for sequence, length in chunks.items():
            end = sequence.num_computed + length
            ids = tuple(sequence.tokens[sequence.num_computed : end])
            is_last = end == len(sequence.tokens)
            context.append(ContextChunk(sequence.slot, sequence.num_computed, ids, is_last))
            self._grow(sequence, end)
        for sequence in generation:
            self._grow(sequence, sequence.num_computed + 1)
        new_blocks = []
        for sequence in (*chunks, *generation):
            if told := tuple(sequence.blocks[sequence.num_told :]):
                new_blocks.append((sequence.slot, told))
            sequence.num_told = len(sequence.blocks)
        batch = ScheduledBatch(
            iteration=self._iteration,
            released_slots=tuple(self._released),
            starts=tuple(self._starts),
            new_blocks=tuple(new_blocks),
            context=tuple(context),
            generation_slots=tuple(sequence.slot for sequence in generation),
        )
        self._iteration += 1
        self._released, self._starts = [], []
        return batch

    def step(self, chunks: Mapping[Row, int] | None = None, generation: Sequence[Row] = ()) -> None:
        """Run one batch and append its tokens."""
        chunks = chunks or {}
        batch = self.batch(chunks, generation)
        logits = self.engine.forward(batch)
        output = self.engine.decode(batch, logits)
        assert output.iteration == batch.iteration
        for sequence, length in chunks.items():
            sequence.num_computed += length
        for sequence in generation:
            sequence.num_computed += 1
        by_slot = {sequence.slot: sequence for sequence in (*chunks, *generation)}
        sampled = batch.sampled_slots()
        assert len(sampled) == len(output.token_ids) == logits.shape[0]
        for slot, tokens, row in zip(sampled, output.token_ids, logits, strict=True):
            by_slot[slot].tokens += tokens
            by_slot[slot].logits.append(row.cpu())

    def generate(self, sequence: Row, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Run one sequence alone until it has so many tokens, its context whole or in chunks."""
        while sequence.num_computed < len(sequence.tokens) - (1 if sequence.logits else 0):
            left = len(sequence.tokens) - sequence.num_computed
            self.step({sequence: min(chunk or left, left)})
        while len(sequence.generated) < num_tokens:
            self.step(generation=[sequence])
        return sequence.generated

    def _grow(self, sequence: Row, num_tokens: int) -> None:
        while len(sequence.blocks) * self.engine.limits.tokens_per_block < num_tokens:
            sequence.blocks.append(self.free_blocks.pop(0))


def alone(engine: TorchEngine, prompt: Sequence[int], num_tokens: int, **options: Any) -> Row:
    """`prompt` and `num_tokens` generated tokens, with the engine to itself."""
    driver = Driver(engine)
    sequence = driver.start(prompt, **options)
    driver.generate(sequence, num_tokens)
    return sequence
