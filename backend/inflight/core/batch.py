"""The contract with the device: what runs in one iteration, and what comes back.

Plain integers and deltas, so that a batch's size follows the rows it holds and not their history. A row is one
sequence. A row's **slot** is a small integer, stable while the sequence runs: the index of everything the device
remembers of it (block table, last token, number of tokens, sampling parameters).

The device applies a batch in this order: forget `released_slots`; remember `starts`; append `new_blocks` to the
block tables; then one packed forward pass over the rows of `context` followed by the rows of `generation_slots`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.core.sampling_config import SamplingConfig


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a slot: at its first context chunk, and again when a paused request resumes.

    Attributes:
        slot: Slot index, 0 .. max_num_sequences - 1.
        request_id: Whose sequence it is; for messages only.
        sequence_index: Which of the request's sequences, part of the key of its random numbers.
        prompt_length: Prompt tokens; a resumed sequence's context is longer by what it had generated.
        sampling: How its tokens are chosen.
    """

    slot: int
    request_id: int
    sequence_index: int
    prompt_length: int
    sampling: SamplingConfig


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Consecutive known tokens of one sequence whose keys and values are to be computed.

    Attributes:
        slot: The sequence's slot.
        start: Position of the first token; positions before it are in the block table already, computed by
            earlier chunks or shared with another sequence.
        token_ids: The chunk, at least one token.
        is_last: Whether the next token is to be sampled from the last row's logits.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One iteration's work.

    Attributes:
        iteration: Count of iterations.
        micro_batch_id: Which of the micro-batches in flight; 0 with one pipeline stage.
        released_slots: Slots whose sequence ended or was paused since the last batch.
        starts: Sequences that take a slot.
        new_blocks: (slot, block ids) to append to the slot's block table.
        context: Context chunks, at most one per slot.
        generation_slots: Slots that feed back their own last token; no slot is also in `context`.
    """

    iteration: int
    micro_batch_id: int = 0
    released_slots: tuple[int, ...] = ()
    starts: tuple[SlotStart, ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    context: tuple[ContextChunk, ...] = ()
    generation_slots: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Sequences in this batch."""
        return len(self.context) + len(self.generation_slots)

    @property
    def num_context_tokens(self) -> int:
        """Tokens over all context chunks."""
        return sum(len(chunk.token_ids) for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        """Rows of the packed forward pass."""
        return self.num_context_tokens + len(self.generation_slots)

    def sampled_slots(self) -> list[int]:
        """Slots that get a token, in the order of `ModelOutput.token_ids`: last context chunks, generation."""
        return [chunk.slot for chunk in self.context if chunk.is_last] + list(self.generation_slots)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the device decided.

    Attributes:
        iteration: The batch's iteration.
        token_ids: Per sampled row, in the order of `ScheduledBatch.sampled_slots`, the new tokens: one.
    """

    iteration: int
    token_ids: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a device declares once it is loaded.

    Attributes:
        vocab_size: Number of token ids.
        max_sequence_length: Longest sequence, in tokens, that the model's positions allow.
        max_num_sequences: Number of slots.
        num_blocks: KV cache blocks.
        tokens_per_block: Tokens per KV cache block.
    """

    vocab_size: int
    max_sequence_length: int
    max_num_sequences: int
    num_blocks: int
    tokens_per_block: int
