"""Drives an engine with batches made by hand: slots and blocks are assigned in order, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from inflight.config import EngineConfig
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import (
    AdapterLoad,
    ContextChunk,
    ContextDetails,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.engine import load
from inflight.engine.engine import ModelEngine
from tests.engine.search import Search

TOKENS_PER_BLOCK = 8


def load_engine(folder: Path, **changes: Any) -> ModelEngine:
    """Return an engine on the CPU with small blocks."""
    values = {"device": "cpu", "tokens_per_block": TOKENS_PER_BLOCK, "max_num_sequences": 6, **changes}
    return load.load_engine(EngineConfig(str(folder), **values))


@dataclass(eq=False)
class Row:
    """One sequence in a test: `tokens` includes the chosen ones, `logits` has the rows they were chosen from."""

    slot: int
    tokens: list[int]
    start: SlotStart
    blocks: list[int]
    num_computed: int = 0
    num_told: int = 0  # blocks already sent to the engine
    logits: list[Tensor] = field(default_factory=list)
    num_accepted: int = 0
    details: list[TokenDetails] = field(default_factory=list)
    context: list[ContextDetails] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return self.start.request.prompt_length

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def take(self, output: ModelOutput, token_ids: Sequence[int], logits: Tensor) -> None:
        """Process one batch's output; `logits` are those of all the row's drafts."""
        self.num_computed += len(token_ids) - 1
        self.num_accepted += len(token_ids) - 1
        self.tokens += token_ids
        self.logits += logits[: len(token_ids)].cpu()
        if self.slot in output.details:
            self.details.append(output.details[self.slot])


class Driver:
    """One engine, its free slots and its free blocks."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self.free_slots = list(range(engine.limits.max_num_sequences))
        self.free_blocks = list(range(engine.limits.num_blocks))
        self.tokens_per_block = engine.limits.tokens_per_block
        self._released: list[int] = []
        self._starts: list[SlotStart] = []
        self._loads: list[AdapterLoad] = []
        self._free_pages = list(range(engine.limits.num_adapter_pages))
        self._iteration = 0

    def put(self, adapter: StoredAdapter, pages: Sequence[int] | None = None) -> int:
        """Load an adapter with the next batch, into these pages or the first free ones; return the first page."""
        if pages is None:
            count = self.engine.limits.adapter_pages(adapter.rank)
            pages, self._free_pages = self._free_pages[:count], self._free_pages[count:]
        self._loads.append(AdapterLoad(adapter, tuple(pages)))
        return pages[0]

    def start(
        self,
        tokens: Sequence[int],
        sampling: SamplingConfig | None = None,
        sequence_index: int = 0,
        shared_blocks: Sequence[int] = (),
        prompt_length: int | None = None,
        adapter: int = -1,
        **options: Any,
    ) -> Row:
        """Start a sequence in the first free slot, its first tokens in `shared_blocks`; return it.

        `adapter` is the first page of its adapter; `options` are arguments of a Request.
        """
        slot = self.free_slots.pop(0)
        length = len(tokens) if prompt_length is None else prompt_length
        request = Request(
            100 + slot, tuple(tokens[:length]), 100, sampling=sampling or SamplingConfig(), **options
        )
        known = tuple(tokens) if request.looks_back else ()
        start = SlotStart(slot, request, sequence_index, known, adapter)
        self._starts.append(start)
        computed = len(shared_blocks) * self.tokens_per_block
        return Row(slot, list(tokens), start, list(shared_blocks), computed)

    def search(self, tokens: Sequence[int], sampling: SamplingConfig, **options: Any) -> Search:
        """Start a beam search, whose context's sequence has the first of its slots; return it."""
        row = self.start(tokens, sampling, **options)
        others = [self.free_slots.pop(0) for _ in range(sampling.beam_width - 1)]
        return Search(row, [row.slot, *others], self.tokens_per_block, self.free_blocks)

    def release(self, sequence: Row, keep_blocks: int = 0) -> None:
        """Release its slot and all but its first `keep_blocks` blocks."""
        self._released.append(sequence.slot)
        self.free_slots.insert(0, sequence.slot)
        self.free_blocks[:0] = sequence.blocks[keep_blocks:]

    def batch(
        self,
        chunks: Mapping[Row, int],
        generation: Sequence[Row] = (),
        drafts: Mapping[Row, Sequence[int]] | None = None,
        searches: Sequence[Search] = (),
    ) -> ScheduledBatch:
        """Return the next batch: chunks with their lengths, maybe followed by drafts, and generation rows."""
        steps = [search.prepare(chunks.get(search.row, 0)) for search in searches]
        context = [
            self._chunk(row, length, tuple((drafts or {}).get(row, ()))) for row, length in chunks.items()
        ]
        for row in generation:
            self._grow(row, row.num_computed + 1)
        new_blocks = []
        for row in (*chunks, *generation):
            if told := tuple(row.blocks[row.num_told :]):
                new_blocks.append((row.slot, told))
            row.num_told = len(row.blocks)
        batch = ScheduledBatch(
            iteration=self._iteration,
            released_slots=tuple(self._released),
            starts=tuple(self._starts),
            adapter_loads=tuple(self._loads),
            block_copies=tuple(copy for step in steps for copy in step.block_copies),
            moves=tuple(move for step in steps for move in step.moves),
            replaced_blocks=tuple(block for step in steps for block in step.replaced_blocks),
            new_blocks=(*new_blocks, *(block for step in steps for block in step.new_blocks)),
            context=tuple(context),
            generation_slots=(
                *(row.slot for row in generation),
                *(slot for step in steps for slot in step.generation_slots),
            ),
            beam_groups=tuple(step.group for step in steps if step.group),
        )
        self._iteration += 1
        self._released, self._starts, self._loads = [], [], []
        return batch

    def step(
        self,
        chunks: Mapping[Row, int] | None = None,
        generation: Sequence[Row] = (),
        drafts: Mapping[Row, Sequence[int]] | None = None,
        searches: Sequence[Search] = (),
    ) -> ModelOutput:
        """Run one batch and append its tokens; the contexts of `searches` are in `chunks`."""
        chunks = chunks or {}
        batch = self.batch(chunks, generation, drafts, searches)
        pending = self.engine.forward(batch)
        output = self.engine.decode(batch, pending)
        assert output.iteration == batch.iteration
        for row, length in chunks.items():
            row.num_computed += length
            if row.slot in output.context:
                row.context.append(output.context[row.slot])
        for row in generation:
            row.num_computed += 1
        self._take(batch, output, pending.result, {row.slot: row for row in (*chunks, *generation)})
        for search, candidates in zip([s for s in searches if s.is_ready], output.beams, strict=True):
            search.take(candidates)
        return output

    def generate(self, sequence: Row, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Run one sequence alone until it has this many tokens, its context whole or in chunks."""
        while sequence.num_computed < len(sequence.tokens) - (1 if sequence.logits else 0):
            left = len(sequence.tokens) - sequence.num_computed
            self.step({sequence: min(chunk or left, left)})
        while len(sequence.generated) < num_tokens:
            self.step(generation=[sequence])
        return sequence.generated

    def _chunk(self, row: Row, length: int, drafts: tuple[int, ...]) -> ContextChunk:
        end = row.num_computed + length
        self._grow(row, end + len(drafts))
        is_last = end == len(row.tokens)
        assert is_last or not drafts
        return ContextChunk(
            slot=row.slot,
            start=row.num_computed,
            token_ids=(*row.tokens[row.num_computed : end], *drafts),
            is_last=is_last,
            num_draft_tokens=len(drafts),
            is_generation=row.num_computed >= row.prompt_length,
            wants_context=row.start.request.output.wants_context and row.num_computed < row.prompt_length,
        )

    def _take(
        self, batch: ScheduledBatch, output: ModelOutput, logits: Tensor, rows: Mapping[int, Row]
    ) -> None:
        sampled = batch.sampled_slots()
        assert len(sampled) == len(output.token_ids)
        num_drafts = {chunk.slot: chunk.num_draft_tokens for chunk in batch.context}
        counts = [1 + num_drafts.get(slot, 0) for slot in sampled]
        assert sum(counts) == logits.shape[0]
        parts = logits.split(counts) if counts else ()
        for slot, token_ids, part in zip(sampled, output.token_ids, parts, strict=True):
            if token_ids:
                rows[slot].take(output, token_ids, part)

    def _grow(self, sequence: Row, num_tokens: int) -> None:
        while len(sequence.blocks) * self.tokens_per_block < num_tokens:
            sequence.blocks.append(self.free_blocks.pop(0))


def alone(engine: ModelEngine, prompt: Sequence[int], num_tokens: int, **options: Any) -> Row:
    """Run `prompt` alone and generate `num_tokens` tokens; return the sequence."""
    driver = Driver(engine)
    sequence = driver.start(prompt, **options)
    driver.generate(sequence, num_tokens)
    return sequence
