"""The state of each slot between iterations, and the slots made void by a failed batch.

Block tables and last tokens are on the device, where the forward pass reads them. Numbers of tokens follow from
the batches and their outputs alone, so they are on the host, where positions and group sizes are computed without
waiting for the device. Independent of the model. Used on the loop thread.

A batch may have been made before the failure of an earlier batch was known, and continue sequences of the failed
batch. If that batch failed before its forward pass, slots may still have the block tables of their previous
owners, and the new batch would write to blocks that belong to other sequences now. `VoidSlots` refuses the new
batch before it has any effect.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.sampling.transfer import as_array, upload


class SlotTable:
    """The state of every slot, on the device and on the host.

    Attributes:
        block_tables: [slots + 1, max_blocks] int64 on the device; padded with the null block.
        last_tokens: [slots + 1] int64 on the device: the inputs of generation rows.
        tokens_per_block: Tokens per KV block.
        null_slot: An additional slot without blocks, for padding rows.
        num_tokens: [slots] int64 on the host: number of tokens in the cache, without drafts that are not accepted.
        num_blocks: [slots] int64 on the host: number of blocks in the slot's table.
        adapters: [slots + 1] int64 on the host: the first page of the slot's adapter; -1: none.
    """

    def __init__(self, limits: EngineLimits, null_block: int, device: torch.device) -> None:
        num_slots, max_blocks = (
            limits.max_num_sequences,
            -(-limits.max_sequence_length // limits.tokens_per_block),
        )
        shape = (num_slots + 1, max_blocks)
        self.block_tables = torch.full(shape, null_block, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.null_slot = num_slots
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        self.adapters = np.full(num_slots + 1, -1, dtype=np.int64)
        self.tokens_per_block = limits.tokens_per_block
        self._null_block = null_block

    def apply(self, batch: ScheduledBatch) -> list[int]:
        """Apply a batch's changes of slots and block tables; return the new blocks, whose content is not used.

        Released slots need no work, as a slot is reset when it is taken again.
        """
        if started := [start.slot for start in batch.starts]:
            self.num_tokens[started] = 0
            self.num_blocks[started] = 0
            self.adapters[started] = [start.adapter for start in batch.starts]
            self.block_tables.index_fill_(0, self._upload(started), self._null_block)
        self._move(batch)
        for chunk in batch.context:
            self.num_tokens[chunk.slot] = chunk.start
        if batch.replaced_blocks:
            slots, columns, block_ids = self._upload(batch.replaced_blocks).unbind(1)
            self.block_tables[slots, columns] = block_ids
        return self._append(batch)

    def advance(self, batch: ScheduledBatch) -> None:
        """Add the batch's rows, except drafts, to the slots' numbers of tokens in the cache."""
        for chunk in batch.context:
            self.num_tokens[chunk.slot] = chunk.start + len(chunk.token_ids) - chunk.num_draft_tokens
        self.num_tokens[list(batch.generation_slots)] += 1

    def positions(self, batch: ScheduledBatch) -> NDArray[np.int64]:
        """Return for each row of logits the position in its sequence of the token that it samples, [rows]; called
        after `advance`."""
        drafts = [chunk.num_draft_tokens for chunk in batch.context if chunk.is_last]
        first = self.num_tokens[batch.sampled_slots()]
        if not any(drafts):
            return first
        counts = np.array([1 + count for count in drafts] + [1] * len(batch.generation_slots))
        begins = np.repeat(counts.cumsum() - counts, counts)
        return np.repeat(first, counts) + np.arange(len(begins)) - begins

    def remember(
        self, batch: ScheduledBatch, output: ModelOutput, only: Collection[int] | None = None
    ) -> None:
        """Apply the sampled tokens: accepted drafts count as tokens, and the last new token is the next input.

        Beam searches have no new token yet: it comes with the moves of their next batch. `only`: restrict to these
        slots.
        """
        slots: list[int] = []
        last: list[int] = []
        for slot, token_ids in zip(batch.sampled_slots(), output.token_ids, strict=True):
            if token_ids and (only is None or slot in only):
                slots.append(slot)
                last.append(token_ids[-1])
                if len(token_ids) > 1:
                    self.num_tokens[slot] += len(token_ids) - 1
        if self.last_tokens.is_cpu:
            as_array(self.last_tokens)[slots] = last
        elif slots:
            rows, tokens = self._upload([slots, last])
            self.last_tokens.index_copy_(0, rows, tokens)

    def last_on_host(self, slots: list[int]) -> list[int]:
        """Return the next inputs of the generation rows of `slots`; empty if only the device knows the inputs."""
        return as_array(self.last_tokens)[slots].tolist() if self.last_tokens.is_cpu else []

    def feed(self, batch: ScheduledBatch, tokens: Tensor) -> None:
        """Set the slots' next inputs, `tokens` [sampled slots] int64 on the device, after a batch that samples
        on the device.

        `remember` follows for slots that need the host, before they have another row.
        """
        self.last_tokens.index_copy_(0, self._upload(batch.sampled_slots()), tokens)

    def _move(self, batch: ScheduledBatch) -> None:
        """Copy the state of parent beams to the beams that continue them. All parents are read first, as beams
        may swap."""
        if not batch.moves:
            return
        moves = [(move.slot, move.parent_slot, move.token_id) for move in batch.moves]
        on_host = np.array(moves, dtype=np.int64)
        self.num_tokens[on_host[:, 0]] = self.num_tokens[on_host[:, 1]]
        self.num_blocks[on_host[:, 0]] = self.num_blocks[on_host[:, 1]]
        self.adapters[on_host[:, 0]] = self.adapters[on_host[:, 1]]
        slots, parents, tokens = self._upload(on_host).unbind(1)
        self.block_tables[slots] = self.block_tables[parents]
        self.last_tokens[slots] = tokens

    def _append(self, batch: ScheduledBatch) -> list[int]:
        writing = {chunk.slot for chunk in batch.context}.union(batch.generation_slots)
        slots: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        fresh: list[int] = []
        for slot, appended in batch.new_blocks:
            first = int(self.num_blocks[slot])
            self.num_blocks[slot] += len(appended)
            slots += [slot] * len(appended)
            columns += range(first, first + len(appended))
            block_ids += appended
            if slot in writing:  # otherwise all its blocks so far are shared with another sequence
                fresh += appended[max(0, self._blocks_in_use(slot) - first) :]
        if slots:
            if max(columns) >= self.block_tables.shape[1]:
                raise ValueError(f"a block table would have more than {self.block_tables.shape[1]} blocks")
            self._put(slots, columns, block_ids)
        return fresh

    def _put(self, slots: list[int], columns: list[int], block_ids: list[int]) -> None:
        if self.block_tables.is_cpu:
            as_array(self.block_tables)[slots, columns] = block_ids
        else:
            row, column, block = self._upload([slots, columns, block_ids])
            self.block_tables[row, column] = block

    def _blocks_in_use(self, slot: int) -> int:
        """Return how many of the slot's blocks contain tokens before this batch runs."""
        return -(-int(self.num_tokens[slot]) // self.tokens_per_block)

    def _upload(self, values: Sequence[Any] | NDArray[np.int64]) -> Tensor:
        # Through numpy, as torch reads nested lists several times slower.
        return upload(np.array(values, dtype=np.int64), self.block_tables.device)


class VoidSlots:
    """The slots of failed batches, whose state is unknown until a sequence starts in them again."""

    def __init__(self) -> None:
        self._slots: set[int] = set()
        self._last: ScheduledBatch | None = None  # the batch whose forward pass began last

    @contextmanager
    def watch(self, batch: ScheduledBatch) -> Generator[None]:
        """Make all slots of the batch void if the body raises, except slots that a following batch has
        restarted."""
        try:
            yield
        except BaseException:  # the state of these slots is unknown afterwards
            self.add(batch, [self._last] if self._last is not None and self._last is not batch else [])
            raise

    def add(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch]) -> None:
        """Make the slots of a failed batch void, except slots that the later batches `since` have restarted.

        A sequence may get a slot but no row, and end before its batch is back: by then the slot may have another
        owner.
        """
        self._slots |= _named(batch) - {start.slot for later in since for start in later.starts}

    def refuse(self, batch: ScheduledBatch) -> None:
        """Raise ValueError if the batch continues in a void slot, before it has any effect.

        A slot is no longer void once a sequence starts in it, or a beam moves there from a slot that is not void.
        """
        self._last = batch
        if not self._slots:
            return
        void = self._slots - {start.slot for start in batch.starts}
        parents = {move.parent_slot for move in batch.moves}
        if not void & parents:
            void -= {move.slot for move in batch.moves}
        if carried_on := void & (_named(batch) | parents):
            raise ValueError(
                f"the batch continues in slot {min(carried_on)}, whose last batch failed; expected a start first"
            )
        self._slots = void


def _named(batch: ScheduledBatch) -> set[int]:
    """Return the slots whose state a batch changes; moved beams are included, as they have rows."""
    return {
        *(start.slot for start in batch.starts),
        *(slot for slot, _ in batch.new_blocks),
        *(chunk.slot for chunk in batch.context),
        *batch.generation_slots,
    }
