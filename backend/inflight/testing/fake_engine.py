"""An engine without a model, whose KV cache stores at every position a digest of the whole prefix up to it.

A row's next token is a digest of everything in the blocks of its block table and in its adapter's pages, and
of its recurrent state if this differs from the digest of the prefix. So any scheduling error changes the
tokens: a wrong block, a block shared or freed too early, a missing copy, a token computed twice or not at
all, a page overwritten while in use, or the recurrent state of another slot or position. The `expected_*`
functions of `fake_model` return the correct tokens. External drafts are verified like drafts without logits.
Two thirds of the drafts that the device guesses are the most likely tokens. Only the loop thread calls the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.head_drafts import GUESSED_ON_DEVICE
from inflight.core.request.request import Request
from inflight.core.schedule.batch import (
    AdapterLoad,
    BeamGroup,
    BeamMove,
    ContextChunk,
    ContextDetails,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.testing.fake_model import (
    PLAIN,
    Conditions,
    choose,
    describe_tokens,
    digest_after,
    later_virtual,
    log_softmax,
    logits_after,
    looks_back,
    rank_candidates,
    remember,
)

_EMPTY = 0  # content of an unwritten position
_NOT_SAVED = -1  # content of a snapshot that was never saved
_NO_ADAPTER = b"nothing", 0  # content of an unwritten adapter page


@dataclass(slots=True)
class _Slot:
    """The device's state of a slot. `history` is used only if the choice of tokens depends on earlier tokens.

    The content of the adapter's pages is not part of `conditions`, but looked up whenever it is used.
    """

    start: SlotStart
    looks_back: bool
    wants_details: bool
    conditions: Conditions
    is_plain: bool
    history: int = 0
    block_table: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    last_token: int = -1
    state: int = _EMPTY  # the recurrent state: digest of the last token
    lacks_entries: bool = False  # a draft head has not read some of the tokens

    def go_on_with(self, token_id: int) -> None:
        self.last_token = token_id
        if self.looks_back:
            self.history = remember(self.history, (token_id,))


@dataclass(frozen=True, slots=True)
class FakeLogits:
    """The result of `forward` for `decode`: digests, from which the logits are derived.

    Attributes:
        sampled: For each of `ScheduledBatch.sampled_slots`, the digests of its rows, one more than its draft
            tokens.
        drafts: By slot, for chunks with drafts: the draft tokens.
        context: By slot, for chunks with context outputs: the request and the digests of the chunk's rows.
            They are stored here because the slot may be discarded by a later batch's failure before they are
            decoded.
        output: The chosen tokens if the batch samples on the device.
    """

    sampled: list[Sequence[int]]
    drafts: dict[int, tuple[int, ...]]
    context: dict[int, tuple[Request, Sequence[int]]]
    output: ModelOutput | None = None


class FakeEngine:
    """An `inflight.core.ports.Engine` whose tokens are digests of its cache's content.

    Args:
        limits: The limits that the engine reports.
        seconds_per_step: Duration of a forward pass in seconds, which is spent sleeping.
        attend_to_all: Whether a row reads every position of the prefix, as attention does. Otherwise it
            reads only the last position, which takes the same time at any length.
    """

    def __init__(
        self, limits: EngineLimits, seconds_per_step: float = 0.0, attend_to_all: bool = True
    ) -> None:
        self.limits = limits
        self._seconds_per_step = seconds_per_step
        self._attend_to_all = attend_to_all
        self._cache = [[_EMPTY] * limits.tokens_per_block for _ in range(limits.num_blocks)]
        self._slots: dict[int, _Slot] = {}
        # The content of each page: the adapter's digest, and the index of the page in the adapter.
        self._adapter_pages: list[tuple[bytes, int]] = [_NO_ADAPTER] * limits.num_adapter_pages
        self._adapters: dict[int, tuple[int, ...]] = {}  # an adapter's pages, by its first page
        self._snapshots = [_NOT_SAVED] * limits.num_state_snapshots

    def forward(self, batch: ScheduledBatch) -> FakeLogits:
        """Apply the deltas and compute every row; also choose tokens if the batch samples on the device."""
        with self._forgotten_on_failure(batch, batch.starts, batch.adapter_loads):
            return self._forward(batch)

    def _forward(self, batch: ScheduledBatch) -> FakeLogits:
        self._apply(batch)
        if self._seconds_per_step:
            time.sleep(self._seconds_per_step)
        sampled: list[Sequence[int]] = []
        drafts: dict[int, tuple[int, ...]] = {}
        context: dict[int, tuple[Request, Sequence[int]]] = {}
        head_slots = set(batch.head_slots)
        for chunk in batch.context:
            tokens, digests = self._run_chunk(chunk)
            if chunk.num_draft_tokens:
                drafts[chunk.slot] = tokens[-chunk.num_draft_tokens :]
            if chunk.wants_context:
                context[chunk.slot] = self._slots[chunk.slot].start.request, digests
            if chunk.is_last:
                sampled.append(digests[-1 - chunk.num_draft_tokens :])
            self._slots[chunk.slot].lacks_entries |= chunk.slot not in head_slots
            self._save_states(batch, chunk.slot, chunk.start, digests)
        for slot in batch.generation_slots:
            row = self._slots[slot]
            row.lacks_entries |= slot not in head_slots
            sampled.append((self._run_token(row, row.last_token),))
            self._save_states(batch, slot, row.num_tokens - 1, sampled[-1])
        logits = FakeLogits(sampled, drafts, context)
        return replace(logits, output=self._decode(batch, logits)) if batch.samples_on_device else logits

    def decode(self, batch: ScheduledBatch, logits: FakeLogits) -> ModelOutput:
        """Convert digests to tokens, and store each token in its slot as the next input, except for beams."""
        with self._forgotten_on_failure(batch, self._still_there(batch.starts)):
            return self._decode(batch, logits)

    def _decode(self, batch: ScheduledBatch, logits: FakeLogits) -> ModelOutput:
        if logits.output is not None:
            return logits.output
        output = ModelOutput(batch.iteration)
        digests_of_beams: dict[int, int] = {
            slot: _EMPTY for group in batch.beam_groups for slot in group.slots
        }
        for slot, digests in zip(batch.sampled_slots(), logits.sampled):
            if slot in digests_of_beams:
                (digests_of_beams[slot],) = digests
                output.token_ids.append(())
                continue
            row = self._slots[slot]
            tokens = self._choose(row, digests, logits.drafts.get(slot, ()))
            output.token_ids.append(tokens)
            if row.wants_details:
                output.details[slot] = self._details(row, digests, tokens)
        for group in batch.beam_groups:
            output.beams.append(self._candidates(group, digests_of_beams))
        for chunk in batch.context:
            if chunk.wants_context:
                output.context[chunk.slot] = self._context_details(chunk, *logits.context[chunk.slot])
        return output

    def close(self) -> None:
        """Discard the slots and the content of the cache."""
        self._slots.clear()
        self._cache.clear()

    # ---------------------------------------------------------------- deltas

    @contextmanager
    def _forgotten_on_failure(
        self, batch: ScheduledBatch, starts: Sequence[SlotStart], loads: Sequence[AdapterLoad] = ()
    ) -> Generator[None]:
        """Discard the slots and loads of a batch that fails, so that they must be started and loaded again."""
        try:
            yield
        except BaseException:  # any error is raised again below
            named = (
                *(start.slot for start in starts),
                *(chunk.slot for chunk in batch.context),
                *batch.generation_slots,
            )
            for slot in named:
                self._slots.pop(slot, None)
            for page in (page for load in loads for page in load.pages):
                self._adapter_pages[page] = _NO_ADAPTER
            raise

    def _still_there(self, starts: Sequence[SlotStart]) -> list[SlotStart]:
        """Return the starts that are still valid: a later batch may have started another sequence in a slot."""
        return [
            start for start in starts if start.slot in self._slots and self._slots[start.slot].start is start
        ]

    def _load(self, load: AdapterLoad) -> None:
        assert len(set(load.pages)) == self.limits.adapter_pages(load.adapter.rank)
        for part, page in enumerate(load.pages):
            self._adapter_pages[page] = load.adapter.digest, part
        self._adapters[load.pages[0]] = load.pages

    def _adapter_in(self, first_page: int) -> bytes:
        """Return the digest of the adapter in these pages.

        Returns another value if the pages do not hold one whole adapter in order.
        """
        held = [self._adapter_pages[page] for page in self._adapters[first_page]]
        digest = held[0][0]
        is_whole = held == [(digest, part) for part in range(len(held))]
        return digest if is_whole else b"".join(each + bytes((part,)) for each, part in held)

    def _apply(self, batch: ScheduledBatch) -> None:
        for load in batch.adapter_loads:
            self._load(load)
        for slot in batch.released_slots:
            self._slots.pop(slot, None)
        for start in batch.starts:
            assert start.slot not in self._slots, f"slot {start.slot} is taken"
            remembers = looks_back(start.request.sampling)
            history = remember(0, start.token_ids) if remembers else 0
            conditions = Conditions.of(start.request)
            is_plain = conditions == PLAIN and start.adapter < 0
            wants_details = start.request.output.wants_details
            self._slots[start.slot] = _Slot(
                start,
                remembers,
                wants_details,
                conditions,
                is_plain,
                history,
                state=_EMPTY if start.snapshot < 0 else self._snapshots[start.snapshot],
            )
        for source, target in batch.block_copies:
            self._cache[target] = self._cache[source].copy()
        self._move(batch.moves)
        for slot, index, block_id in batch.replaced_blocks:
            self._slots[slot].block_table[index] = block_id
        for slot, block_ids in batch.new_blocks:
            self._slots[slot].block_table.extend(block_ids)

    def _move(self, moves: Sequence[BeamMove]) -> None:
        moved: dict[int, _Slot] = {}
        for move in moves:
            parent = self._slots[move.parent_slot]
            beam = replace(parent, block_table=parent.block_table.copy())
            beam.go_on_with(move.token_id)
            moved[move.slot] = beam
        self._slots.update(moved)

    # ---------------------------------------------------------------- the forward pass

    def _run_chunk(self, chunk: ContextChunk) -> tuple[tuple[int, ...], list[int]]:
        """Return the chunk's tokens, with guessed drafts, and the digests of its rows."""
        row = self._slots[chunk.slot]
        assert chunk.start >= row.num_tokens, f"slot {chunk.slot} goes back to position {chunk.start}"
        self._check_ids(chunk, row.start.request)
        can_guess = not row.lacks_entries or GUESSED_ON_DEVICE not in chunk.token_ids
        assert can_guess, f"slot {chunk.slot}: a draft head has not read some of the tokens"
        row.num_tokens = chunk.start
        later: Sequence[Sequence[int]] = ((),) * len(chunk.token_ids)
        if self.limits.has_spans:
            later = later_virtual(chunk.token_ids, self.limits.vocab_size)
        tokens: list[int] = []
        digests: list[int] = []
        for token_id, following in zip(chunk.token_ids, later, strict=True):
            tokens.append(self._guess(digests[-1]) if token_id == GUESSED_ON_DEVICE else token_id)
            digests.append(self._run_token(row, tokens[-1], following))
        return tuple(tokens), digests

    def _guess(self, digest: int) -> int:
        """Return the most likely token after a prefix, or another one for a third of all prefixes."""
        logits = logits_after(digest, self.limits.vocab_size)
        return (logits.index(max(logits)) + (digest % 3 == 0)) % self.limits.vocab_size

    def _check_ids(self, chunk: ContextChunk, request: Request) -> None:
        """Check that only prompts have ids of prompt table rows, but not generated or draft tokens."""
        num_rows = 0 if request.prompt_table is None else request.prompt_table.num_rows
        behind = max(0, request.prompt_length - chunk.start)
        assert max(chunk.token_ids) < self.limits.vocab_size + num_rows, f"slot {chunk.slot}: no such row"
        others = chunk.token_ids[behind:]
        assert not others or max(others) < self.limits.vocab_size, (
            f"slot {chunk.slot} generates rows of a table"
        )

    def _run_token(self, row: _Slot, token_id: int, later: Sequence[int] = ()) -> int:
        size, position = self.limits.tokens_per_block, row.num_tokens
        if self._attend_to_all:
            held = [digest for block_id in row.block_table for digest in self._cache[block_id]]
            prefix: Sequence[int] = held[:position]
        elif position:
            prefix = (self._cache[row.block_table[(position - 1) // size]][(position - 1) % size],)
        else:
            prefix = ()
        if self.limits.has_state and row.state != (prefix[-1] if prefix else _EMPTY):
            prefix = (*prefix, row.state)
        digest = digest_after(
            prefix, token_id if row.is_plain else self._seen(row, token_id, position, later)
        )
        self._cache[row.block_table[position // size]][position % size] = digest
        row.num_tokens += 1
        row.state = digest
        return digest

    def _save_states(self, batch: ScheduledBatch, slot: int, start: int, digests: Sequence[int]) -> None:
        """Save snapshots of a slot's recurrent states; `digests` belong to its tokens from position `start` on."""
        for save in batch.state_saves:
            if save.slot == slot:
                self._snapshots[save.snapshot] = digests[save.num_tokens - 1 - start]

    def _seen(self, row: _Slot, token_id: int, position: int, later: Sequence[int]) -> int:
        conditions = row.conditions
        if row.start.adapter >= 0:
            conditions = replace(conditions, adapter=self._adapter_in(row.start.adapter))
        return conditions.seen_as(token_id, position, later)

    # ---------------------------------------------------------------- decoding

    def _choose(self, row: _Slot, digests: Sequence[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Choose a token for each row of logits, and stop after the first token that differs from its draft."""
        start, vocab_size = row.start, self.limits.vocab_size
        sampling, index = start.request.sampling, start.sequence_index
        row.num_tokens -= len(drafts)
        tokens: list[int] = []
        for number, digest in enumerate(digests):
            token_id = choose(digest, row.history, sampling, index, row.num_tokens, vocab_size)
            tokens.append(token_id)
            row.go_on_with(token_id)
            if number == len(drafts) or token_id != drafts[number]:
                break
            row.num_tokens += 1
        row.state = digests[len(tokens) - 1]
        return tuple(tokens)

    def _details(self, row: _Slot, digests: Sequence[int], tokens: tuple[int, ...]) -> TokenDetails:
        logits = [logits_after(digest, self.limits.vocab_size) for digest, _ in zip(digests, tokens)]
        return describe_tokens(logits, tokens, row.start.request.output)

    def _candidates(self, group: BeamGroup, digests: dict[int, int]) -> BeamCandidates:
        rows = [(digests[slot], self._slots[slot].history) for slot in group.slots]
        request = self._slots[group.slots[0]].start.request
        return rank_candidates(group, rows, request, self.limits.vocab_size)

    def _context_details(
        self, chunk: ContextChunk, request: Request, digests: Sequence[int]
    ) -> ContextDetails:
        vocab_size = self.limits.vocab_size
        logits = [
            logits_after(digest, vocab_size)
            for position, digest in enumerate(digests, chunk.start)
            if position < request.prompt_length
        ]
        following = request.input_token_ids[chunk.start + 1 : chunk.start + 1 + len(logits)]
        log_probs = ()
        if request.output.return_prompt_log_probs:
            log_probs = tuple(log_softmax(values)[token] for values, token in zip(logits, following))
        data = (
            b"".join(values.tobytes() for values in logits) if request.output.return_context_logits else b""
        )
        return ContextDetails(log_probs, data)
