"""Short ways to run the pipeline on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import BeamGroup, ContextChunk, ModelOutput, ScheduledBatch, SlotStart
from inflight.sampling import Sampler
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from inflight.sampling.row_kernels import RowKernels

CPU = torch.device("cpu")
ROW_KERNELS: list[RowKernels] = [RowKernels()]  # the last one is used
MAX_LENGTH = 1024


def floats(values: Sequence | np.ndarray | Tensor) -> FloatTensor:
    array = np.asarray(values, dtype=np.float32)
    return FloatTensor(array.shape, array.tobytes())


def make_request(
    prompt: Sequence[int] = (0,),
    *,
    end_ids: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    bias: Sequence[float] | None = None,
    drafts: Sequence[int] | None = None,
    draft_logits: Sequence[Sequence[float]] | Tensor | None = None,
    threshold: float | None = None,
    output: OutputOptions | None = None,
    num_table_rows: int = 0,
    **sampling: Any,
) -> Request:
    """A request; `num_table_rows` is the number of ids beyond the vocabulary that its prompt may have."""
    draft = None
    if drafts is not None:
        logits = None if draft_logits is None else floats(draft_logits)
        draft = ExternalDraft(tuple(drafts), logits, threshold)
    return Request(
        request_id=1,
        input_token_ids=tuple(prompt),
        max_new_tokens=MAX_LENGTH,
        end_ids=tuple(end_ids),
        bad_words=tuple(bad_words),
        embedding_bias=None if bias is None else floats(bias),
        draft=draft,
        sampling=SamplingConfig(**sampling),
        output=output or OutputOptions(),
        prompt_table=make_table(num_table_rows) if num_table_rows else None,
    )


def make_table(num_rows: int) -> PromptTable:
    """A prompt table for tests without a model."""
    return PromptTable.of(Matrix((num_rows, 1), "float32", RawBuffer(bytes(4 * num_rows))))


@dataclass(frozen=True)
class Row:
    """A sequence whose next token is to be chosen: prompt and `generated`, then `drafts` to verify."""

    request: Request = field(default_factory=make_request)
    generated: tuple[int, ...] = ()
    sequence_index: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.request.input_token_ids + self.generated


def make_sampler(
    num_slots: int,
    vocab_size: int,
    device: torch.device = CPU,
    normalize_log_probs: bool = False,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
) -> Sampler:
    return Sampler(
        num_slots, MAX_LENGTH, vocab_size, device, ROW_KERNELS[-1], normalize_log_probs, processors
    )


def start_batch(rows: Sequence[Row], slots: Sequence[int] | None = None) -> tuple[ScheduledBatch, np.ndarray]:
    """Make a batch in which every row starts, and its positions; rows with drafts come first, as chunks."""
    slots = range(len(rows)) if slots is None else slots
    placed = sorted(zip(rows, slots, strict=True), key=lambda item: not item[0].drafts)
    assert [row for row, _ in placed] == list(rows), "rows with drafts come first"
    starts, chunks, generation, positions = [], [], [], []
    for row, slot in placed:
        known = row.tokens if row.request.looks_back else ()
        starts.append(SlotStart(slot, row.request, row.sequence_index, known))
        first = len(row.tokens)
        positions += range(first, first + len(row.drafts) + 1)
        if row.drafts:
            token_ids = (row.tokens[-1], *row.drafts)
            chunks.append(ContextChunk(slot, first - 1, token_ids, True, len(row.drafts)))
        else:
            generation.append(slot)
    batch = ScheduledBatch(0, starts=tuple(starts), context=tuple(chunks), generation_slots=tuple(generation))
    return batch, np.array(positions, dtype=np.int64)


def decode_rows(
    logits: Tensor, rows: Sequence[Row], sampler: Sampler | None = None, slots: Sequence[int] | None = None
) -> ModelOutput:
    """Sample a batch of fresh rows and return the output."""
    sampler = sampler or make_sampler(len(rows), logits.shape[-1], logits.device)
    batch, positions = start_batch(rows, slots)
    sampler.apply(batch)
    sampler.apply_drafts(batch)
    return sampler.decode(batch, logits, positions)


def choose_tokens(logits: Tensor, rows: Sequence[Row]) -> list[int | None]:
    """Return the tokens of rows without drafts; None if every token is banned."""
    return [tokens[0] if tokens else None for tokens in decode_rows(logits, rows).token_ids]


def beams_of(
    logits: Tensor,
    request: Request,
    tokens: Sequence[Sequence[int]],
    scores: Sequence[float],
    num_candidates: int,
) -> BeamCandidates:
    """Return the candidates of one search with a slot for each of `tokens`."""
    sampler = make_sampler(len(scores), logits.shape[-1], logits.device)
    generated = [tuple(beam[request.prompt_length :]) for beam in tokens]
    batch, positions = start_batch([Row(request, beam) for beam in generated])
    group = BeamGroup(tuple(range(len(scores))), tuple(scores), num_candidates)
    batch = replace(batch, beam_groups=(group,))
    sampler.apply(batch)
    sampler.apply_drafts(batch)
    return sampler.decode(batch, logits, positions).beams[0]
