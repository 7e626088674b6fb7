"""The Sampler, which the engine calls before and after its forward passes.

Owns the sampling state of slots, and assembles a batch's `ModelOutput`. Independent of KV blocks and the forward
pass. Called on the loop thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.guide import GUIDE_END
from inflight.core.schedule.batch import BeamGroup, ContextChunk, ModelOutput, ScheduledBatch, TokenDetails
from inflight.guided.grammars import Grammars
from inflight.sampling.details import beam_candidates, join_details, token_details, with_drawn_log_probs
from inflight.sampling.drafts import NO_TOKEN, accept_by_chance, accept_equal, drafts_of, weighed_draft
from inflight.sampling.guides import Guides, Masked
from inflight.sampling.history import History
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from inflight.sampling.nan_check import check_peaks
from inflight.sampling.pipeline import pipeline_steps, process
from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.rows import Failures, Needs, RawLogits, Rows, SlotParameters, select_rows
from inflight.sampling.threads import threads_for
from inflight.sampling.top_k_top_p import Drawn, samples_of
from inflight.sampling.transfer import Arriving, to_host, upload


@dataclass(frozen=True, slots=True)
class _LogitsRows:
    """The rows of logits of each sampled slot.

    Attributes:
        slots: [sampled slots].
        counts: [sampled slots] number of rows of each slot.
        first_rows: [sampled slots] index of each slot's first row.
        drafted: First row and chunk, for each chunk with drafts.
    """

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    drafted: list[tuple[int, ContextChunk]]

    @classmethod
    def from_batch(cls, batch: ScheduledBatch, sampled_slots: Sequence[int]) -> _LogitsRows:
        slots = np.array(sampled_slots, dtype=np.int64)
        chunks = [chunk for chunk in batch.context if chunk.is_last]
        counts = np.ones(len(slots), dtype=np.int64)
        counts[: len(chunks)] += np.array([chunk.num_draft_tokens for chunk in chunks], dtype=np.int64)
        first_rows = counts.cumsum() - counts
        drafted = [(int(first), chunk) for first, chunk in zip(first_rows, chunks) if chunk.num_draft_tokens]
        return cls(slots, counts, first_rows, drafted)


@dataclass(frozen=True, slots=True)
class _Choosing:
    """Rows whose tokens are being sampled on the device, until the host has the tokens.

    Attributes:
        layout: The rows of each slot.
        rows: The processed rows.
        raw: The rows' unprocessed logits.
        failed: The rows that have failed, by index.
        ends: [rows] whether a row allows only the end, without an end id.
        ranked: [rows] whether a row belongs to a beam search and gets no token.
        guesses: Tokens that may have to be sampled again.
    """

    layout: _LogitsRows
    rows: Rows
    raw: RawLogits
    failed: Failures
    ends: NDArray[np.bool_]
    ranked: NDArray[np.bool_]
    guesses: list[Drawn]

    def beside(self) -> list[Tensor]:
        """For each guess, [n] bool on the device, to be copied to the host with the tokens and highest logits."""
        return [guess.is_final for guess in self.guesses if guess.is_final is not None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens of a batch that samples on the device.

    Attributes:
        tokens: [sampled slots] int64 on the device, the inputs of the next forward pass; undefined if no token is
            possible, and for slots that need the host.
        arriving: Tokens (NO_TOKEN if none is possible), highest logits, and `_Choosing.beside`, on their way to
            the host.
        host_slots: Slots that need the host: their next input is known only after the host has seen the tokens.
        choosing: The state for `finish`; None without host slots.
    """

    tokens: Tensor
    arriving: Arriving
    host_slots: frozenset[int] = frozenset()
    choosing: _Choosing | None = None


class Sampler:
    """Turns logits into tokens, beam candidates and log probabilities."""

    @torch.inference_mode()
    def __init__(
        self,
        num_slots: int,
        max_sequence_length: int,
        vocab_size: int,
        device: torch.device,
        kernels: RowKernels | None = None,
        normalize_log_probs: bool = False,
        processors: LogitsPostProcessors = NO_POST_PROCESSORS,
        grammars: Grammars | None = None,
    ) -> None:
        """Allocate the history, [num_slots, max_sequence_length] int32 on `device`.

        `kernels` None means torch's. With `normalize_log_probs`, rows that ask for log probabilities also get
        them in the distribution from which their token was sampled. `processors` are the functions that
        requests may name. Without `grammars`, rows with guides fail.
        """
        self._normalize_log_probs = normalize_log_probs
        self._vocab_size = vocab_size
        self._kernels = kernels or RowKernels()
        self._history = History(num_slots, max_sequence_length, device)
        self._guides = Guides(grammars, vocab_size)
        steps = pipeline_steps(self._history, self._kernels, processors, self._guides)
        self._slots = SlotParameters(num_slots, device, steps)

    @torch.inference_mode()
    def apply(self, batch: ScheduledBatch) -> None:
        """Apply a batch's releases, starts and moves, before its forward pass.

        Does not depend on the forward pass, so the state of slots is complete even if the forward pass fails.
        """
        for slot in batch.released_slots:
            self._slots.release(slot)
        for start in batch.starts:
            self._slots.start(start)
            if self._looks_back(start.slot):
                self._history.start(start.slot, start.token_ids)
        if batch.moves:
            self._move(batch)
        self._guides.apply(batch)

    @torch.inference_mode()
    def apply_drafts(self, batch: ScheduledBatch) -> None:
        """Apply the drafts of a batch's chunks, none of which is GUESSED_ON_DEVICE any more."""
        self._guides.apply_drafts(batch)
        for chunk in batch.context:
            if chunk.num_draft_tokens and self._looks_back(chunk.slot):
                drafts = np.array(drafts_of(chunk), dtype=np.int64)
                end = chunk.start + len(chunk.token_ids)
                positions = np.arange(end - len(drafts), end)
                self._history.write(np.full_like(positions, chunk.slot), positions, drafts)

    @torch.inference_mode()
    def decode(self, batch: ScheduledBatch, logits: Tensor, positions: NDArray[np.int64]) -> ModelOutput:
        """Sample the tokens of every sampled row, and add them to the history.

        Args:
            batch: The batch that was passed to `apply`.
            logits: [rows, vocab_size] float32 in the order of `ScheduledBatch.sampled_slots`, with 1 +
                num_draft_tokens rows for a chunk. Rows of requests with a bias, penalties or bans are changed in
                place, except if the request asks for log probabilities or logits, of context or output.
            positions: [rows] on the host: absolute position of the token that each row samples.

        Returns:
            Tokens, beams and details. The engine fills `context`.

        Raises:
            ValueError: The shapes of logits or positions do not match the batch.
            FloatingPointError: The highest logit of a row whose token is used is not finite. No state was changed.
        """
        slots = batch.sampled_slots()
        self._check(batch, logits, positions)
        if not slots:
            return ModelOutput(batch.iteration)
        peaks = self._kernels.find_peaks(logits)
        if self._is_plain(batch, slots):
            return _plain_output(batch, slots, positions, to_host(peaks.tokens, peaks.highest))
        with threads_for(logits):
            layout = _LogitsRows.from_batch(batch, slots)
            tokens, choosing = self._start_choosing(batch, layout, logits, positions, peaks.tokens)
            return self._make_output(batch, choosing, to_host(tokens, peaks.highest, *choosing.beside()))

    @torch.inference_mode()
    def begin(self, batch: ScheduledBatch, logits: Tensor, positions: NDArray[np.int64]) -> Choice:
        """Start to sample a batch's tokens on the device and to copy them to the host; `finish` waits for them.

        Gives the same tokens as `decode`. Arguments as for `decode`, with at least one row. Logits are changed in
        place if no row needs the host, and copied otherwise, as the next forward pass may overwrite them.

        Raises:
            ValueError: See `decode`.
        """
        slots = batch.sampled_slots()
        self._check(batch, logits, positions)
        highest, likeliest = self._kernels.find_peaks(logits)
        if self._is_plain(batch, slots):
            return Choice(likeliest, Arriving.send(likeliest, highest))
        layout = _LogitsRows.from_batch(batch, slots)
        needs_host = self._slots.numbers["needs"][layout.slots] & int(Needs.HOST) != 0
        logits = logits.clone() if needs_host.any() else logits
        tokens, choosing = self._start_choosing(batch, layout, logits, positions, likeliest)
        first = tokens[upload(layout.first_rows, tokens.device)] if layout.drafted else tokens
        arriving = Arriving.send(tokens, highest, *choosing.beside())
        if needs_host.any():
            host_slots = frozenset(layout.slots[needs_host].tolist())
            return Choice(first.clamp(min=0), arriving, host_slots, choosing)
        assert not (choosing.failed or choosing.guesses), (
            "rows that may fail or be sampled again need the host"
        )
        return Choice(first.clamp(min=0), arriving)

    @torch.inference_mode()
    def finish(self, batch: ScheduledBatch, choice: Choice, positions: NDArray[np.int64]) -> ModelOutput:
        """Wait for the tokens of `begin`, then do the host's part for rows that need it.

        Since `begin`, slots may have been given to other sequences, but not slots of rows that need the host.

        Raises:
            FloatingPointError: See `decode`.
        """
        arrived = choice.arriving.wait()
        if choice.choosing is None:
            return _plain_output(batch, batch.sampled_slots(), positions, arrived)
        return self._make_output(batch, choice.choosing, arrived)

    @torch.inference_mode()
    def post_process(self, batch: ScheduledBatch, logits: Tensor, positions: NDArray[np.int64]) -> None:
        """Call the logits post-processors as `decode` does, on a rank that does not sample; `remember` follows.

        The changed logits and any errors are dropped, as another rank samples.
        """
        slots = batch.sampled_slots()
        if not self._slots.demanding.isdisjoint(slots):
            rows = self._rows(_LogitsRows.from_batch(batch, slots), logits.contiguous(), positions)
            rows.numbers["steps"] &= 1  # the first step calls the post-processors
            process(rows, self._slots)

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Record the tokens that another rank has sampled, except tokens of beams, which come with the next
        moves."""
        first = {slot: self._history.length(slot) for slot in batch.generation_slots}
        for chunk in batch.context:
            first[chunk.slot] = chunk.start + len(chunk.token_ids) - chunk.num_draft_tokens
        for slot, tokens in zip(batch.sampled_slots(), output.token_ids, strict=True):
            if tokens and self._looks_back(slot):
                positions = np.arange(len(tokens), dtype=np.int64) + first[slot]
                self._history.write(
                    np.full_like(positions, slot), positions, np.array(tokens, dtype=np.int64)
                )

    def _check(self, batch: ScheduledBatch, logits: Tensor, positions: NDArray[np.int64]) -> None:
        num_rows = len(batch.sampled_slots()) + _num_drafts(batch)
        if logits.shape != (num_rows, self._vocab_size) or positions.shape != (num_rows,):
            raise ValueError(
                f"logits {list(logits.shape)} and positions {list(positions.shape)} for {num_rows} rows of a "
                f"vocabulary of {self._vocab_size}"
            )

    def _is_plain(self, batch: ScheduledBatch, slots: list[int]) -> bool:
        """Whether each sampled slot gets the token with its highest logit, and nothing else is needed."""
        return not batch.beam_groups and self._slots.demanding.isdisjoint(slots) and _num_drafts(batch) == 0

    def _start_choosing(
        self,
        batch: ScheduledBatch,
        layout: _LogitsRows,
        logits: Tensor,
        positions: NDArray[np.int64],
        likeliest: Tensor,
    ) -> tuple[Tensor, _Choosing]:
        """Process the rows, and sample [rows] int64 tokens on the device, some of which may be guesses.

        `likeliest` are the tokens with the highest unprocessed logits, [rows] int64.
        """
        rows = self._rows(layout, logits.contiguous(), positions)
        raw = RawLogits(rows)
        failed = process(rows, self._slots)
        masked = self._guides.take_masked()
        ends = np.zeros(len(rows.slots), dtype=bool)
        if masked is not None:
            ends[masked.indices] = masked.ends
        ranked = np.isin(rows.slots, [slot for group in batch.beam_groups for slot in group.slots])
        tokens, guesses = self._choose(rows, likeliest, masked, np.flatnonzero(~ranked))
        return tokens, _Choosing(layout, rows, raw, failed, ends, ranked, guesses)

    def _make_output(
        self, batch: ScheduledBatch, choosing: _Choosing, arrived: list[NDArray[Any]]
    ) -> ModelOutput:
        """Return a batch's output, given tokens, highest logits and `_Choosing.beside`; record the tokens."""
        layout, rows, raw = choosing.layout, choosing.rows, choosing.raw
        failed, ends, ranked = choosing.failed, choosing.ends, choosing.ranked
        emitted = ~ranked
        chosen, highest = self._choose_on_host(rows, choosing.guesses, arrived)
        for first, chunk in layout.drafted:
            self._accept(rows, first, chunk, chosen, emitted)
        used = np.flatnonzero(emitted | ranked)  # without rows after a rejected draft
        check_peaks(highest[used], rows.slots[used], rows.positions[used])
        was_used = (row for row in sorted(failed, reverse=True) if emitted[row] or ranked[row])
        # If several rows of a slot have failed, the error of the first one is used.
        failures = {int(rows.slots[row]): failed[row] for row in was_used}
        if failures:
            emitted &= ~np.isin(rows.slots, list(failures))
        ended = emitted & ends & (chosen == NO_TOKEN)
        final_tokens = np.where(ended, GUIDE_END, chosen)
        emitted &= chosen != NO_TOKEN
        output = ModelOutput(
            batch.iteration,
            _tokens(layout, final_tokens, emitted | ended),
            self._beams(batch, rows, raw, ends),
            self._details(rows, raw, chosen, emitted),
            failures=failures,
        )
        raw.restore()
        self._remember(rows, chosen, emitted)
        return output

    def _choose_on_host(
        self, rows: Rows, guesses: list[Drawn], arrived: list[NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Sample again for rows whose guess was wrong, because many tokens are needed to reach top_p.

        Returns:
            [rows] tokens (NO_TOKEN where all tokens are banned, undefined for rows of beams), and highest
            logits.
        """
        tokens, highest, *are_final = arrived
        again = [
            guess.rows[~is_final & (tokens[guess.rows] != NO_TOKEN)]
            for guess, is_final in zip(guesses, are_final, strict=True)
        ]
        for drawn in itertools.chain.from_iterable(self._kernels.draw(rows, part) for part in again):
            (tokens[drawn.rows],) = to_host(drawn.tokens)
        return tokens, highest

    def _choose(
        self, rows: Rows, likeliest: Tensor, masked: Masked | None, wanted: NDArray[np.int64]
    ) -> tuple[Tensor, list[Drawn]]:
        """Return [rows] int64 tokens on the device (NO_TOKEN where all tokens are banned), and the guesses
        among them.

        On a CPU nothing is guessed. On other devices, the tokens of rows with only a top_p are guesses, which
        saves waiting for the device.
        """
        samples = samples_of(rows)[wanted]
        tokens = self._choose_likeliest(rows, likeliest, masked, wanted[~samples])
        guesses: list[Drawn] = []
        for drawn in self._kernels.draw(rows, wanted[samples], may_guess=tokens.device.type != "cpu"):
            tokens[rows.upload(drawn.rows)] = drawn.tokens
            if drawn.is_final is not None:
                guesses.append(drawn)
        if len(rows.needing(Needs.BANS)):
            chosen = rows.logits.gather(-1, tokens[:, None]).squeeze(-1)
            # If the sampled token is banned, all tokens are.
            tokens.masked_fill_(chosen == -torch.inf, NO_TOKEN)
        return tokens, guesses

    def _choose_likeliest(
        self, rows: Rows, likeliest: Tensor, masked: Masked | None, greedy: NDArray[np.int64]
    ) -> Tensor:
        """Return [rows] int64 tokens with the highest logits in the rows `greedy`; undefined in other rows.

        `likeliest` holds for rows that no step has changed, and `masked` for rows whose last change is a mask.
        Other rows are read again.
        """
        tokens = likeliest.clone()
        is_known = rows.numbers["needs"] & int(Needs.CHANGES) == 0
        if masked is not None:
            tokens[rows.upload(masked.indices)] = masked.likeliest
            is_known[masked.indices] = True
        unknown = greedy[~is_known[greedy]]
        if len(unknown):
            tokens[rows.upload(unknown)] = self._kernels.find_likeliest(rows, unknown)
        return tokens

    def _accept(
        self,
        rows: Rows,
        first: int,
        chunk: ContextChunk,
        chosen: NDArray[np.int64],
        emitted: NDArray[np.bool_],
    ) -> None:
        """Write a chunk's new tokens to its first rows of `chosen`; its other rows give no tokens."""
        drafts, end = drafts_of(chunk), first + chunk.num_draft_tokens + 1
        request = self._slots[chunk.slot].request
        draft = weighed_draft(request, chunk, int(rows.positions[first]))
        if draft is None:
            tokens = accept_equal(drafts, chosen[first:end].tolist())
        else:
            verified = rows.select(np.arange(first, end - 1))
            tokens = accept_by_chance(drafts, verified, draft, int(chosen[end - 1]))
        chosen[first : first + len(tokens)] = tokens
        emitted[first + len(tokens) : end] = False

    def _beams(
        self, batch: ScheduledBatch, rows: Rows, raw: RawLogits, ends: NDArray[np.bool_]
    ) -> list[BeamCandidates]:
        if not batch.beam_groups:
            return []
        row_of = {slot: row for row, slot in enumerate(rows.slots.tolist())}  # a beam has one row
        return [
            self._candidates(group, np.array([row_of[slot] for slot in group.slots]), rows, raw, ends)
            for group in batch.beam_groups
        ]

    def _candidates(
        self,
        group: BeamGroup,
        indices: NDArray[np.int64],
        rows: Rows,
        raw: RawLogits,
        ends: NDArray[np.bool_],
    ) -> BeamCandidates:
        request = self._slots[group.slots[0]].request
        raw_logits = raw.select(indices) if request.output.wants_details else None
        return beam_candidates(group, request, select_rows(rows.logits, indices), raw_logits, ends[indices])

    def _details(
        self, rows: Rows, raw: RawLogits, chosen: NDArray[np.int64], emitted: NDArray[np.bool_]
    ) -> dict[int, TokenDetails]:
        indices = rows.needing(Needs.DETAILS)
        indices = indices[emitted[indices]]
        if not len(indices):
            return {}
        slots = rows.slots[indices].tolist()
        outputs = [self._slots[slot].request.output for slot in slots]
        found: dict[int, TokenDetails] = {}
        details = token_details(raw.select(indices), rows.upload(chosen[indices]), outputs)
        if self._normalize_log_probs:
            details = with_drawn_log_probs(details, rows.select(indices), chosen[indices])
        for slot, detail in zip(slots, details, strict=True):
            found[slot] = join_details(found[slot], detail) if slot in found else detail
        return found

    def _remember(self, rows: Rows, chosen: NDArray[np.int64], emitted: NDArray[np.bool_]) -> None:
        """Append new tokens to the history, advance guides, and record tokens that reset top_p."""
        indices = rows.needing(Needs.GUIDE)
        indices = indices[emitted[indices]]
        self._guides.accept(rows.slots[indices], chosen[indices])
        indices = rows.needing(Needs.HISTORY)
        indices = indices[emitted[indices]]
        if len(indices):
            self._history.write(rows.slots[indices], rows.positions[indices], chosen[indices])
        indices = rows.needing(Needs.TOP_P_RESET)
        indices = indices[emitted[indices] & (chosen[indices] == rows.numbers["top_p_reset_id"][indices])]
        self._slots.numbers["top_p_since"][rows.slots[indices]] = rows.positions[indices] + 1

    def _rows(self, layout: _LogitsRows, logits: Tensor, positions: NDArray[np.int64]) -> Rows:
        slots = np.repeat(layout.slots, layout.counts) if layout.drafted else layout.slots
        rows = Rows(logits, slots, positions, self._slots.numbers[slots])
        for first, chunk in layout.drafted:
            # If a draft resets top_p, the rows after it use the reset value.
            for index, token_id in enumerate(drafts_of(chunk), first):
                if token_id == rows.numbers["top_p_reset_id"][index]:
                    rows.numbers["top_p_since"][index + 1 : first + chunk.num_draft_tokens + 1] = (
                        positions[index] + 1
                    )
        return rows

    def _move(self, batch: ScheduledBatch) -> None:
        self._slots.move(batch.moves)
        moves = [move for move in batch.moves if self._looks_back(move.slot)]
        if moves:
            slots, parents = [move.slot for move in moves], [move.parent_slot for move in moves]
            self._history.move(slots, parents, [move.token_id for move in moves])

    def _looks_back(self, slot: int) -> bool:
        return bool(self._slots.numbers["needs"][slot] & int(Needs.HISTORY))


def _num_drafts(batch: ScheduledBatch) -> int:
    return sum(chunk.num_draft_tokens for chunk in batch.context if chunk.is_last)


def _plain_output(
    batch: ScheduledBatch, slots: list[int], positions: NDArray[np.int64], arrived: list[NDArray[Any]]
) -> ModelOutput:
    """Return the output of a batch whose slots each get the token with the highest logit, from [rows] tokens
    and peaks."""
    tokens, highest = arrived
    check_peaks(highest, slots, positions)
    found = list(zip(tokens.tolist()))
    if (NO_TOKEN,) in found:
        found = [() if each == (NO_TOKEN,) else each for each in found]
    return ModelOutput(batch.iteration, found)


def _tokens(
    layout: _LogitsRows, chosen: NDArray[np.int64], emitted: NDArray[np.bool_]
) -> list[tuple[int, ...]]:
    """Return the new tokens of every sampled slot."""
    if emitted.all() and not layout.drafted:
        return list(zip(chosen.tolist()))
    tokens, flags = chosen.tolist(), emitted.tolist()
    return [
        tuple(itertools.compress(tokens[first : first + count], flags[first : first + count]))
        for first, count in zip(layout.first_rows.tolist(), layout.counts.tolist())
    ]
