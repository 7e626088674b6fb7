"""The contract with the device: what runs in one iteration, and what comes back.

Plain integers and deltas, so that a batch's size follows the rows it holds and not their history. A row is one
sequence. A row's **slot** is a small integer, stable while the sequence runs: the index of everything the device
remembers of it (block table, last token, number of tokens, tokens seen, sampling parameters). A beam search has a
slot for each beam; its context runs in the first of them.

The device applies a batch in this order:

1. put the adapters of `adapter_loads` into their pages; forget `released_slots`, remember `starts`, each with its
   adapter, which stays in its pages as long as the slot is the sequence's, and with the recurrent state of its
   snapshot or of no tokens;
2. copy the blocks of `block_copies`;
3. apply `moves`, all at once: each takes over the state of a beam as it was before any of them;
4. put the blocks of `replaced_blocks` in their places, then append `new_blocks` to the block tables;
5. one packed forward pass over the rows of `context`, then those of `generation_slots`, which saves the states of
   `state_saves`, each as it is after the token that is named.

A **recurrent state** is what some models remember of a sequence beside its blocks: one state of fixed size for
each slot, after all tokens that are computed, accepted drafts included and rejected ones not. A beam that moves
takes over its parent's.

A batch fails when `forward` or `decode` raises, for whatever reason and however far it got. Then

- what the device remembers of the slots that the batch named (starts, blocks, rows) is void, and so is what it
  wrote into blocks: only this batch's sequences had them to write to; but where `decode` raises, a batch that was
  forwarded meanwhile may have started some of these slots again, for sequences that had no row in this one;
- so are the snapshots that its `state_saves` named;
- so are the pages that its `adapter_loads` named: the adapters are loaded again, and sequences that use them
  in batches that were made before the failure was known are started anew as well. A row whose adapter's pages
  hold nothing of use must not harm the other rows of such a batch;
- sequences without a start, blocks, a row or their adapter in it are untouched, and get the tokens of a run
  without the failure;
- the scheduler releases the void slots, tells the batch's `released_slots` again, but for those that are taken by
  then, and starts the sequences anew, from their known tokens, in any slots; a beam search begins again;
- therefore releasing a slot that is free or was never started does nothing, and a start leaves nothing of what
  the slot held before;
- a batch that was made before the failure was known and carries on in a void slot fails too; or, if it had been
  forwarded by then, comes back with tokens of those slots that count for nothing.

A row fails alone when it is known to be the row at fault, as where the code of a single request raises that takes
part in choosing its token. `ModelOutput.failures` says so, and the batch has not failed: every other row has its
tokens, and the scheduler ends the request of the failed row and releases its slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.additional_outputs import OfferedOutput
from inflight.config import SchedulerConfig
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import ModelLimits, Request
from inflight.core.request.response import TopLogProbs
from inflight.errors import InflightError


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a slot, at its first context chunk or when it resumes after a pause.

    Attributes:
        slot: Slot index, 0 .. max_num_sequences - 1.
        request: What was asked: sampling, end ids, bad words, bias, draft, outputs.
        sequence_index: Which of the request's sequences, part of the key of its random numbers.
        token_ids: Every token known so far, prompt and generated, if choosing the next one looks back at them
            or what has been generated decides what may come (`Request.starts_with_tokens`); else empty.
        adapter: The first page of its adapter, which is on the device until the sequence leaves; -1: none.
        snapshot: The snapshot of recurrent state that it begins with, behind the blocks in its table; -1: the
            state of no tokens.
    """

    slot: int
    request: Request
    sequence_index: int = 0
    token_ids: tuple[int, ...] = ()
    adapter: int = -1
    snapshot: int = -1


@dataclass(frozen=True, slots=True)
class StateSave:
    """The recurrent state of a slot is to be copied to a snapshot.

    Attributes:
        slot: The slot, which has a row in the batch.
        num_tokens: The state is that after so many tokens of the sequence: the last of them is in the batch's rows
            of the slot, inside a chunk or at its end, and no draft.
        snapshot: 0 .. num_state_snapshots - 1; what it held before is of no use any more.
    """

    slot: int
    num_tokens: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter takes pages of the device's memory for adapters; what they held before is of no use any more.

    Attributes:
        adapter: What to put there.
        pages: Page ids, 0 .. num_adapter_pages - 1, as many as its rank needs. The first one names it from now on.
    """

    adapter: StoredAdapter
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Consecutive known tokens of one sequence whose keys and values are to be computed.

    The chunk may end with draft tokens: a guess at what comes next, verified in the same pass. Then it has
    1 + num_draft_tokens rows of logits, from the last token that is certain on. Only a last chunk has drafts.

    Attributes:
        slot: The sequence's slot.
        start: Position of the first token; positions before it are in the block table already, computed by
            earlier chunks or shared with another sequence.
        token_ids: The chunk, at least one token, draft tokens included.
        is_last: Whether the next token is to be chosen from the last row's logits.
        num_draft_tokens: How many of `token_ids`, at the end, are drafts.
        is_generation: Whether this is a sequence in generation that verifies drafts, and no context.
        wants_context: Whether the request's context outputs are wanted of this chunk's rows.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool
    num_draft_tokens: int = 0
    is_generation: bool = False
    wants_context: bool = False


@dataclass(frozen=True, slots=True)
class BeamMove:
    """A beam goes on from some beam of its search, itself or another.

    Attributes:
        slot: The beam's slot, which may never have been started.
        parent_slot: Whose memory it takes over: block table, number of tokens, tokens seen, parameters.
        token_id: The token with which it goes on: the slot's last token.
    """

    slot: int
    parent_slot: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamGroup:
    """One beam search's sampled rows in a batch: the context's, or one for each running beam.

    Attributes:
        slots: The rows' slots, in the order of the beams.
        scores: Per row, the beam's cumulative log probability as `BeamSearch` adds it up.
        num_candidates: How many of the best continuations, over all rows, are wanted.
    """

    slots: tuple[int, ...]
    scores: tuple[float, ...]
    num_candidates: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One iteration's work.

    Attributes:
        iteration: Number of the iteration.
        micro_batch_id: Index among the micro-batches in flight; 0 with one pipeline stage.
        released_slots: Slots whose sequence ended or was paused since the last batch.
        starts: Sequences that take a slot.
        adapter_loads: Adapters that take pages. No running sequence uses what these held.
        block_copies: (source, target): blocks whose content another beam or sequence is about to continue
            differently. All sources are read before a target is written.
        moves: Beams that go on, for every running beam search.
        replaced_blocks: (slot, index, block id): the block id to put at this index of the slot's block table.
        new_blocks: (slot, block ids): the block ids to append to the slot's block table.
        context: Chunks of known tokens, at most one per slot.
        generation_slots: Slots that feed back their own last token; no slot is also in `context`.
        beam_groups: The sampled rows that belong to beam searches.
        state_saves: Snapshots to take of recurrent states.
        samples_on_device: Whether the device is to remember the tokens that it chooses before `decode` tells
            them: the next batch, which feeds them, is forwarded first. That one has no row that depends on a
            token of a sequence that needs the host (`Request.needs_host`).
    """

    iteration: int
    micro_batch_id: int = 0
    released_slots: tuple[int, ...] = ()
    starts: tuple[SlotStart, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    moves: tuple[BeamMove, ...] = ()
    replaced_blocks: tuple[tuple[int, int, int], ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    context: tuple[ContextChunk, ...] = ()
    generation_slots: tuple[int, ...] = ()
    beam_groups: tuple[BeamGroup, ...] = ()
    state_saves: tuple[StateSave, ...] = ()
    samples_on_device: bool = False

    @property
    def num_rows(self) -> int:
        """Number of sequences in this batch; every beam counts as one."""
        return len(self.context) + len(self.generation_slots)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all chunks of `context`."""
        return sum(len(chunk.token_ids) for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the packed forward pass."""
        return self.num_context_tokens + len(self.generation_slots)

    def sampled_slots(self) -> list[int]:
        """Slots that get tokens, in the order of `ModelOutput.token_ids`: those of last chunks, then generation.

        The logits' rows are in the same order, 1 + num_draft_tokens of them for a chunk.
        """
        return [chunk.slot for chunk in self.context if chunk.is_last] + list(self.generation_slots)


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """More about the new tokens of one row; each part is empty unless the request's OutputConfig asks for it.

    Attributes:
        log_probs: Per token, its log probability by the model.
        top_log_probs: Per token, the likeliest tokens beside it.
        logits: Per token, the row that it was chosen from: float32 [vocab_size] as bytes.
        drawn_log_probs: Per token, its log probability in the distribution that it was drawn from, after all that
            the request's sampling controls do. Only from an engine that normalizes log probabilities.
        additional_outputs: Per token, a row of each of `OutputConfig.additional_outputs`, in their order, of the
            position that it was chosen from: float32 [width] as bytes.
    """

    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    logits: tuple[bytes, ...] = ()
    drawn_log_probs: tuple[float, ...] = ()
    additional_outputs: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ContextDetails:
    """Context outputs of one chunk's rows; each part is empty unless the request's OutputConfig asks for it.

    A last chunk's draft rows are left out.

    Attributes:
        log_probs: Per row, the model's log probability of the token that follows it in the prompt; one fewer where
            the chunk ends the prompt.
        logits: float32 [rows, vocab_size]; one row for each of the chunk's positions within the prompt.
        additional_outputs: Of each of `OutputConfig.gathered_outputs`, in their order, the same rows: float32
            [rows, width].
    """

    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    additional_outputs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The device's answer to a batch.

    Attributes:
        iteration: Number of the batch's iteration.
        token_ids: Per slot of `ScheduledBatch.sampled_slots`, its new tokens: one; with d drafts 1 to d + 1, all
            but the last of which are accepted drafts; () where what the request asks for bans every token, where
            the row has failed, and for rows of beam searches. The last may be GUIDE_END.
        beams: Per group of `ScheduledBatch.beam_groups`, the best continuations; of a group with a failed row,
            anything.
        details: Details of new tokens, by slot, for rows whose request asks for log probs, logits or
            additional outputs; not for beams.
        context: Context outputs, by slot, for chunks that want them.
        failures: Why rows have failed alone, by sampled slot: their requests end with these errors. A beam search
            ends where any of its rows has failed.
    """

    iteration: int
    token_ids: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    beams: list[BeamCandidates] = field(default_factory=list[BeamCandidates])
    details: dict[int, TokenDetails] = field(default_factory=dict[int, TokenDetails])
    context: dict[int, ContextDetails] = field(default_factory=dict[int, ContextDetails])
    failures: dict[int, InflightError] = field(default_factory=dict[int, InflightError])


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits and abilities that an engine declares once its model is loaded.

    Attributes:
        vocab_size: Number of token ids.
        max_sequence_length: Longest sequence, in tokens, that the model's positions allow.
        max_num_sequences: Number of slots.
        num_blocks: KV cache blocks.
        tokens_per_block: Tokens per KV cache block.
        num_micro_batches: How many batches of different sequences may be in flight: the number of pipeline stages.
        overlaps_iterations: Whether the next batch of the same sequences may be forwarded before one is decoded,
            if that one samples on the device. For a device that computes while the host does other things.
        takes_all_processors: Whether a forward pass computes on every processor that this process may use.
        logits_post_processors: Names of the functions that may change a request's logits; the same on all ranks.
        additional_outputs: What it computes for requests that ask for it.
        hidden_size: Width of the rows of prompt tables; 0: it takes none.
        num_adapter_pages: How much room there is for adapters, in pages; 0: it takes none.
        adapter_page_rank: A page has room for so many ranks of every module of every layer.
        max_adapter_rank: Largest rank of an adapter.
        shares_blocks: Whether a block may be more than one sequence's; without it sequences of one request compute
            their prompt each, and there are neither searches nor reuse.
        has_state: Whether a slot remembers a recurrent state beside its blocks.
        num_state_snapshots: How many copies of such states it has room for, beside those of the slots.
    """

    vocab_size: int
    max_sequence_length: int
    max_num_sequences: int
    num_blocks: int
    tokens_per_block: int
    num_micro_batches: int = 1
    overlaps_iterations: bool = False
    takes_all_processors: bool = False
    logits_post_processors: tuple[str, ...] = ()
    additional_outputs: tuple[OfferedOutput, ...] = ()
    hidden_size: int = 0
    num_adapter_pages: int = 0
    adapter_page_rank: int = 8
    max_adapter_rank: int = 0
    shares_blocks: bool = True
    has_state: bool = False
    num_state_snapshots: int = 0

    def adapter_pages(self, rank: int) -> int:
        """How many pages an adapter of this rank takes."""
        return -(-rank // self.adapter_page_rank)

    def num_due(self, num_in_flight: int, batch: ScheduledBatch | None) -> int:
        """How many batches, from the oldest on, have to be decoded before another one is made.

        Args:
            num_in_flight: Number of batches that were forwarded and not decoded.
            batch: The last of them; None if no batch could be made now, so that one has to come back first.
        """
        if batch is None:
            return min(1, num_in_flight)
        num_behind = int(batch.samples_on_device) if self.overlaps_iterations else self.num_micro_batches - 1
        return max(0, num_in_flight - num_behind)

    def model_limits(self, config: SchedulerConfig) -> ModelLimits:
        """The limits for one request on this device under `config`."""
        longest = self.max_sequence_length - 1
        chunked, slots = config.enable_chunked_context, self.max_num_sequences
        return ModelLimits(
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            max_input_length=longest if chunked else min(longest, config.max_num_tokens),
            num_blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block,
            max_beam_width=min(config.max_beam_width or slots, slots),
            # Chunked, a draft and the last chunk fit beside a token for every other running request.
            max_draft_length=config.max_num_tokens - (slots - 1 + self.tokens_per_block if chunked else 1),
            max_context_tokens=1 << 62 if chunked else config.max_num_tokens,
            logits_post_processors=self.logits_post_processors,
            additional_outputs=self.additional_outputs,
            hidden_size=self.hidden_size,
            max_adapter_rank=self.max_adapter_rank if self.num_adapter_pages else 0,
            max_sequences_per_request=config.max_sequences_per_request,
        )
