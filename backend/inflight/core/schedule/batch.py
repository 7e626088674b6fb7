"""The contract with the device: the work of one iteration and its results.

Plain integers and deltas, so that a batch's size depends on its rows and not on their history. A row is one
sequence. A row's **slot** is a small integer, stable while the sequence runs, that indexes all device state of the
sequence (block table, last token, number of tokens, tokens seen, sampling parameters). A beam search has one slot
per beam; its context runs in the first of them.

The device applies a batch in this order:

1. put the adapters of `adapter_loads` into their pages; free `released_slots`; then apply `starts`. A slot starts
   with the recurrent state of its snapshot, or without a snapshot with the initial state. The slot's adapter stays
   in its pages until the slot is released;
2. copy the blocks of `block_copies`;
3. apply `moves` simultaneously: each copies the state of a beam as it was before all moves;
4. put the blocks of `replaced_blocks` into the block tables, then append `new_blocks` to the block tables;
5. run one packed forward pass over the rows of `context`, then of `generation_slots`; it also copies recurrent
   states to the snapshots of `state_saves`.

Some models have a **recurrent state** for each slot, besides the blocks. Its size is fixed, and it depends on
every token computed in the slot, including accepted drafts but not rejected ones. A moved beam copies its
parent's state.

A batch fails when `forward` or `decode` raises, for whatever reason and at whatever point. Then

- the device state of the slots that the batch named (starts, blocks, rows) is void, and so are the blocks that it
  wrote to, which belong to sequences of this batch only. But if `decode` raises, a later batch whose `forward`
  was called before may have restarted some of these slots for sequences without a row in the failed batch;
- the snapshots named by its `state_saves` are void;
- the pages named by its `adapter_loads` are void too: the adapters are loaded again, and sequences that use them
  in batches made before the failure was known are restarted as well. In such a batch, a row whose adapter pages
  are void must not harm the other rows;
- sequences without a start, block, row or adapter load in the batch are not affected, and get the same tokens as
  without the failure;
- the scheduler releases the void slots, reports the batch's `released_slots` again except slots taken since, and
  restarts the sequences from their known tokens, in any slots; a beam search begins again;
- therefore releasing a slot that is free or was never started does nothing, and a start discards all previous
  state of the slot;
- a batch that was made before the failure was known and continues in a void slot fails too; or, if its `forward`
  had been called already, its tokens for void slots are ignored.

A row fails alone if it is known to be faulty, for example because request-specific code raised while its token was
sampled. The row is then listed in `ModelOutput.failures`, and the batch has not failed: every other row has its
tokens, and the scheduler ends the failed row's request and releases its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from inflight.additional_outputs import OfferedOutput
from inflight.config import SchedulingConfig
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.head_drafts import GUESSED_ON_DEVICE
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.errors import InflightError


@dataclass(frozen=True, slots=True)
class SlotStart:
    """The start of a sequence in a slot, with its first context chunk or after a pause.

    Attributes:
        slot: Slot index, 0 .. max_num_sequences - 1.
        request: The request: sampling, end ids, bad words, bias, draft, outputs.
        sequence_index: Index among the request's sequences, part of the key of its random numbers.
        token_ids: All tokens known so far, if sampling the next one depends on them
            (`Request.starts_with_tokens`); otherwise empty.
        adapter: The first page of the sequence's adapter, which stays on the device until the sequence
            leaves; -1: the sequence has no adapter.
        snapshot: The snapshot of recurrent state after the tokens in the block table, from which the slot starts;
            -1: the slot starts from the initial state.
    """

    slot: int
    request: Request
    sequence_index: int = 0
    token_ids: tuple[int, ...] = ()
    adapter: int = -1
    snapshot: int = -1


@dataclass(frozen=True, slots=True)
class StateSave:
    """A copy of a slot's recurrent state to a snapshot.

    Attributes:
        slot: The slot, which has rows in the batch.
        num_tokens: Number of the sequence's tokens after which the state is copied. The last of these tokens is in
            the batch, as a generation row or in a chunk, and is not a draft.
        snapshot: Snapshot index, 0 .. num_state_snapshots - 1; its previous content is overwritten.
    """

    slot: int
    num_tokens: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The load of an adapter into pages on the device, whose previous content is void.

    Attributes:
        adapter: The adapter to load.
        pages: Page ids, 0 .. num_adapter_pages - 1, as many as the adapter's rank needs. The first page identifies
            the adapter from now on.
    """

    adapter: StoredAdapter
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Consecutive known tokens of one sequence whose keys and values are to be computed.

    The chunk may end with draft tokens, guessed next tokens that are verified in the same forward pass. Then it
    has 1 + num_draft_tokens rows of logits, starting at the last known token. Only a last chunk has drafts. If
    `EngineLimits.has_spans`, a chunk does not end inside a picture span, but it may begin inside one.

    Attributes:
        slot: The sequence's slot.
        start: Position of the first token; positions before it are in the block table already, computed by
            earlier chunks or shared with another sequence.
        token_ids: The chunk, at least one token, draft tokens included. Draft tokens that are GUESSED_ON_DEVICE
            are guessed by the model's draft head before the forward pass.
        is_last: Whether the next token is sampled from the last row's logits.
        num_draft_tokens: Number of draft tokens at the end of `token_ids`.
        is_generation: Whether the sequence is in generation and the chunk, which only verifies drafts, does
            not count as context.
        wants_context: Whether context outputs are wanted for this chunk's rows.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool
    num_draft_tokens: int = 0
    is_generation: bool = False
    wants_context: bool = False

    @property
    def is_guessed(self) -> bool:
        """Whether the draft tokens are GUESSED_ON_DEVICE."""
        return self.token_ids[-1] == GUESSED_ON_DEVICE

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The chunk without draft tokens."""
        return self.token_ids[: len(self.token_ids) - self.num_draft_tokens]


@dataclass(frozen=True, slots=True)
class BeamMove:
    """The step of a beam, which continues a beam of its search, itself or another one.

    Attributes:
        slot: The beam's slot, in which a sequence need not have started.
        parent_slot: The slot whose state is copied: block table, number of tokens, tokens seen, parameters.
        token_id: The token that continues the beam, which becomes the slot's last token.
    """

    slot: int
    parent_slot: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamGroup:
    """The sampled rows of one beam search in a batch: the context's row, or one per running beam.

    Attributes:
        slots: The rows' slots, in the order of the beams.
        scores: For each row, the beam's cumulative log probability as `BeamSearch` adds it up.
        num_candidates: Number of best continuations to return for all rows together.
    """

    slots: tuple[int, ...]
    scores: tuple[float, ...]
    num_candidates: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of the device in one iteration: changes of slots and blocks, and the rows of one forward pass.

    Attributes:
        iteration: Number of the iteration.
        micro_batch_id: Index among the micro-batches in flight; 0 with one pipeline stage.
        released_slots: Slots whose sequence ended or was paused since the last batch.
        starts: Sequences that take a slot.
        adapter_loads: Adapters that take pages. No running sequence uses the previous content of these pages.
        block_copies: (source, target) blocks to copy, because two beams or sequences will continue the content
            differently. All sources are read before any target is written.
        moves: The beams to continue, for every running beam search.
        replaced_blocks: (slot, index, block id) entries to overwrite in block tables.
        new_blocks: (slot, block ids) to append to block tables.
        context: Chunks of known tokens, at most one per slot.
        generation_slots: Slots whose input is their own last token; no slot is also in `context`.
        beam_groups: The sampled rows that belong to beam searches.
        state_saves: Recurrent states to copy to snapshots.
        head_slots: Slots whose rows a draft head must read, so that it can guess tokens after them, now or later;
            it need not read the others.
        samples_on_device: Whether the device must keep the sampled tokens, because `forward` is called for
            the next batch, whose inputs they are, before `decode` for this one. The next batch has no row that
            depends on a token of a sequence that needs the host (`Request.needs_host`).
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
    head_slots: tuple[int, ...] = ()
    samples_on_device: bool = False

    @property
    def num_rows(self) -> int:
        """Number of sequences in this batch; every beam counts as one."""
        return len(self.context) + len(self.generation_slots)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens of all chunks in `context`."""
        return sum(len(chunk.token_ids) for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the packed forward pass."""
        return self.num_context_tokens + len(self.generation_slots)

    @property
    def num_guesses(self) -> int:
        """Number of draft tokens that are GUESSED_ON_DEVICE."""
        return sum(chunk.num_draft_tokens for chunk in self.context if chunk.is_guessed)

    def with_guesses(self, token_ids: Sequence[int]) -> ScheduledBatch:
        """Return the batch with `num_guesses` tokens in place of GUESSED_ON_DEVICE, in the order of `context`."""
        rest = iter(token_ids)
        context = (
            replace(chunk, token_ids=(*chunk.known_tokens, *islice(rest, chunk.num_draft_tokens)))
            if chunk.is_guessed
            else chunk
            for chunk in self.context
        )
        return replace(self, context=tuple(context))

    def sampled_slots(self) -> list[int]:
        """Return the slots that get tokens, in the order of `ModelOutput.token_ids`: last chunks, then generation.

        The logits' rows are in the same order, with 1 + num_draft_tokens rows for a chunk.
        """
        return [chunk.slot for chunk in self.context if chunk.is_last] + list(self.generation_slots)


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Details of the new tokens of one row; each field is empty unless the request's OutputConfig asks for it.

    Attributes:
        log_probs: For each token, its log probability by the model.
        top_log_probs: For each token, the most likely tokens at its position.
        logits: For each token, the row of logits from which it was sampled: float32 [vocab_size] as bytes.
        drawn_log_probs: For each token, its log probability in the distribution from which it was sampled,
            after all sampling controls. Only from an engine that normalizes log probabilities.
        additional_outputs: For each token, a row of each of `OutputConfig.additional_outputs`, in their
            order, at the position at which the token was sampled: float32 [width] as bytes.
    """

    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    logits: tuple[bytes, ...] = ()
    drawn_log_probs: tuple[float, ...] = ()
    additional_outputs: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ContextDetails:
    """Context outputs of one chunk's rows; each field is empty unless the request's OutputConfig asks for it.

    Draft rows of a last chunk are left out.

    Attributes:
        log_probs: For each row, the model's log probability of the next token of the prompt; one fewer if
            the chunk ends the prompt.
        logits: float32 [rows, vocab_size] as bytes, with one row per position of the chunk within the prompt.
        additional_outputs: For each of `OutputConfig.gathered_outputs`, in their order, float32 [rows,
            width] as bytes, with one row per position of the chunk within the prompt.
    """

    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    additional_outputs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The device's output for a batch.

    Attributes:
        iteration: Number of the batch's iteration.
        token_ids: For each of `ScheduledBatch.sampled_slots`, the new tokens: one, or with d drafts 1 to d + 1, of
            which all but the last are accepted drafts. Empty if the request's bans leave no token, if the row has
            failed, and for rows of beam searches. The last token may be GUIDE_END.
        beams: For each of `ScheduledBatch.beam_groups`, the best continuations; undefined for a group with
            a failed row.
        details: Details of new tokens by slot, for requests that ask for log probabilities, logits or additional
            outputs; not for beams.
        context: Context outputs by slot, for chunks that want them.
        failures: By sampled slot, the errors of rows that failed alone, with which their requests end. A
            beam search ends if any of its rows has failed.
    """

    iteration: int
    token_ids: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    beams: list[BeamCandidates] = field(default_factory=list[BeamCandidates])
    details: dict[int, TokenDetails] = field(default_factory=dict[int, TokenDetails])
    context: dict[int, ContextDetails] = field(default_factory=dict[int, ContextDetails])
    failures: dict[int, InflightError] = field(default_factory=dict[int, InflightError])


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits and capabilities that an engine declares once its model is loaded.

    Attributes:
        vocab_size: Number of token ids.
        max_sequence_length: Longest sequence, in tokens, that the model's positions allow.
        max_num_sequences: Number of slots.
        num_blocks: Number of KV cache blocks.
        tokens_per_block: Tokens per KV cache block.
        num_micro_batches: Number of batches of different sequences that may be in flight, which is the number of
            pipeline stages.
        overlaps_iterations: Whether `forward` may be called for the next batch of the same sequences before
            `decode` for the current one, if that samples on the device. For a device that computes
            asynchronously.
        takes_all_processors: Whether a forward pass computes on every processor that this process may use.
        logits_post_processors: Names of the functions that may change a request's logits; the same on all ranks.
        additional_outputs: The additional outputs that the engine can compute.
        hidden_size: Row width of prompt tables; 0: the engine does not support prompt tables.
        num_added_layers: Number of first layers after which a wider prompt table's rows are added (DeepStack).
        rotary_dim: Row width of rotary tables; 0: the model has no multimodal rotary embedding (mRoPE).
        has_spans: Whether consecutive virtual tokens attend to each other in both directions
            (`picture_spans.py`).
        num_adapter_pages: Number of pages for adapters; 0: the engine accepts no adapters.
        adapter_page_rank: Number of LoRA ranks, for every module of every layer, that one page stores.
        max_adapter_rank: Largest rank of an adapter.
        shares_blocks: Whether sequences may share blocks. Without it each sequence of a request computes the
            prompt itself, and there is neither beam search nor prefix reuse.
        has_state: Whether a slot has a recurrent state besides its blocks.
        num_state_snapshots: Number of snapshots of recurrent states for which there is memory.
        break_even_rows: Number of rows that take as long as the fixed part of a forward pass, which is mostly
            reading the weights. In a batch of n rows, a draft token saves time if it is accepted with a
            probability of at least n / (n + break_even_rows).
        guess_cost: Time that a draft head takes to guess a token, relative to a forward pass; 0: there is no draft
            head. A draft token saves time if it is accepted with a probability that is larger by `guess_cost`.
        entry_cost: Time that a draft head takes to store what its guesses need of a token (the token's entry),
            relative to a forward pass; 0: there is no draft head.
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
    num_added_layers: int = 0
    rotary_dim: int = 0
    has_spans: bool = False
    num_adapter_pages: int = 0
    adapter_page_rank: int = 8
    max_adapter_rank: int = 0
    shares_blocks: bool = True
    has_state: bool = False
    num_state_snapshots: int = 0
    break_even_rows: int = 256
    guess_cost: float = 0.0
    entry_cost: float = 0.0

    def needed_share(self, num_sequences: int) -> float:
        """Return the probability with which a draft token must be accepted to save time, in a batch of
        `num_sequences` sequences."""
        return num_sequences / (num_sequences + self.break_even_rows) + self.guess_cost

    @property
    def has_useful_head(self) -> bool:
        """Whether there is a draft head, and right guesses of it save time at least for a sequence alone."""
        return self.entry_cost > 0 and self.needed_share(1) < 1

    def adapter_pages(self, rank: int) -> int:
        """Return how many pages an adapter of this rank takes."""
        return -(-rank // self.adapter_page_rank)

    def num_due(self, num_in_flight: int, batch: ScheduledBatch | None) -> int:
        """Return how many batches, oldest first, must be decoded before another one is made.

        Args:
            num_in_flight: Number of batches for which `forward` was called but not `decode`.
            batch: The last of these batches; None if no batch can be made before one is decoded.
        """
        if batch is None:
            return min(1, num_in_flight)
        num_behind = int(batch.samples_on_device) if self.overlaps_iterations else self.num_micro_batches - 1
        return max(0, num_in_flight - num_behind)

    def model_limits(self, config: SchedulingConfig) -> ModelLimits:
        """Return the limits for one request on this device under `config`."""
        longest = self.max_sequence_length - 1
        chunked, slots = config.enable_chunked_context, self.max_num_sequences
        return ModelLimits(
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            max_input_length=longest if chunked else min(longest, config.max_num_tokens),
            num_blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block,
            max_beam_width=min(config.max_beam_width or slots, slots),
            # With chunking, a draft and the last chunk must fit together with one token of every other running
            # request.
            max_draft_length=config.max_num_tokens - (slots - 1 + self.tokens_per_block if chunked else 1),
            max_context_tokens=1 << 62 if chunked else config.max_num_tokens,
            logits_post_processors=self.logits_post_processors,
            additional_outputs=self.additional_outputs,
            hidden_size=self.hidden_size,
            num_added_layers=self.num_added_layers,
            rotary_dim=self.rotary_dim,
            # With chunking, a span must fit together with one token of every other running request.
            max_span_length=config.max_num_tokens - (slots - 1 if chunked else 0) if self.has_spans else 0,
            max_adapter_rank=self.max_adapter_rank if self.num_adapter_pages else 0,
            max_sequences_per_request=config.max_sequences_per_request,
        )
