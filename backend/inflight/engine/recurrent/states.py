"""The recurrent states of all slots, and their snapshots, on the device.

The memory has one entry for each slot, then an unused entry, then one for each snapshot. A chunk is computed in
segments that end where a state is saved. Draft tokens do not change the slot's state: their rows are kept, and
`accept` applies accepted drafts. Compiled layers compute the rows of a batch themselves (`cpu/decoder.py`).
Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inflight.core.schedule.batch import ContextChunk, ModelOutput, ScheduledBatch, StateSave
from inflight.engine.block_memory import Entries
from inflight.engine.packing import PackedBatch
from inflight.engine.recurrent.mixers import Mixer, State, empty_state
from inflight.models.recurrent import RecurrentConfig
from inflight.sampling.transfer import upload

_NO_SNAPSHOT = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `begin` .. `end` - 1 of the packed batch: consecutive tokens of one slot.

    Attributes:
        slot: The slot.
        begin: The first row.
        end: The row after the last one.
        snapshot: Index, in the memory, of the snapshot to which the state after the last row is saved; -1: it is
            not saved.
        is_draft: Whether these are draft tokens, which do not change the slot's state.
    """

    slot: int
    begin: int
    end: int
    snapshot: int = _NO_SNAPSHOT
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The rows of a packed batch, grouped by the states that they use.

    Attributes:
        segments: The rows of chunks.
        generation_begin: The first generation row.
        generation_slots: Slots of the generation rows, [generation rows] int64 on the device.
        saved_slots: [saves] int64 on the device: slots whose states are saved after their generation row.
        snapshots: [saves] int64 on the device: index, in the memory, of the snapshot for each of `saved_slots`.
    """

    segments: tuple[Segment, ...]
    generation_begin: int
    generation_slots: Tensor
    saved_slots: Tensor
    snapshots: Tensor


class RecurrentStates:
    """The states of a rank's recurrent layers: allocates them and computes the layers' rows.

    Args:
        config: Configuration of this rank's part of a layer.
        num_layers: Number of recurrent layers of this rank.
        num_slots: Number of slots.
        num_snapshots: Number of snapshots.
        dtype: Dtype of activations.
        device: Device of the memory.

    Attributes:
        memory: The states of the convolutions and of linear attention, see `mixers`, each [layers, entries, …];
            compiled layers have their own order inside an entry.
        metadata: Describes the batch that is computed; None before the first one.
    """

    def __init__(
        self,
        config: RecurrentConfig,
        num_layers: int,
        num_slots: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_rows = num_slots + 1 + num_snapshots
        self.memory = empty_state(config, dtype, device, num_layers, num_rows)
        self._first_snapshot = num_slots + 1
        self._device = device
        self.metadata: StateMetadata | None = None
        self._drafts: dict[int, list[Callable[[int], None]]] = {}  # by slot

    @property
    def snapshots(self) -> Entries:
        """The memory of the snapshots, one entry each, from which and to which the block store copies bytes."""
        return Entries(self.memory, dimension=1, first=self._first_snapshot)

    def apply(self, batch: ScheduledBatch) -> None:
        """Initialize the states of started slots, with zeros or a snapshot, and apply the moves of beams."""
        for start in batch.starts:
            self._drafts.pop(start.slot, None)
        if batch.starts:
            fresh = [start.slot for start in batch.starts if start.snapshot == _NO_SNAPSHOT]
            restored = [
                (start.slot, start.snapshot) for start in batch.starts if start.snapshot != _NO_SNAPSHOT
            ]
            if fresh:
                for part in self.memory:
                    part.index_fill_(1, self._upload(fresh), 0)
            self._copy([(slot, self._first_snapshot + snapshot) for slot, snapshot in restored])
        self._copy([(move.slot, move.parent_slot) for move in batch.moves])

    def begin(self, batch: ScheduledBatch, packed: PackedBatch) -> None:
        """Prepare to `run` the layers on the rows of a batch, as packed by `pack`."""
        self.metadata = metadata = self._divide(batch, packed)
        self._drafts.update({segment.slot: [] for segment in metadata.segments if segment.is_draft})

    def _divide(self, batch: ScheduledBatch, packed: PackedBatch) -> StateMetadata:
        saves: dict[int, list[StateSave]] = {}
        for save in batch.state_saves:
            saves.setdefault(save.slot, []).append(save)
        segments: list[Segment] = []
        for chunk, rows in zip(batch.context, packed.chunks, strict=True):
            segments += self._segments(chunk, rows.begin, saves.pop(chunk.slot, ()))
        in_generation = [
            (save.slot, self._first_snapshot + save.snapshot) for each in saves.values() for save in each
        ]
        saved = self._upload(in_generation).view(-1, 2)
        return StateMetadata(
            tuple(segments),
            packed.generation_begin,
            packed.slots[packed.generation_begin :],
            saved[:, 0],
            saved[:, 1],
        )

    def _segments(self, chunk: ContextChunk, begin: int, saves: Collection[StateSave]) -> list[Segment]:
        """Return the segments of a chunk whose first row is `begin`."""
        segments: list[Segment] = []
        certain = begin + len(chunk.token_ids) - chunk.num_draft_tokens
        for save in sorted(saves, key=lambda save: save.num_tokens):
            end = begin + save.num_tokens - chunk.start
            first = segments[-1].end if segments else begin
            segments.append(Segment(chunk.slot, first, end, self._first_snapshot + save.snapshot))
        first = segments[-1].end if segments else begin
        if first < certain:
            segments.append(Segment(chunk.slot, first, certain))
        if chunk.num_draft_tokens:
            segments.append(Segment(chunk.slot, certain, certain + chunk.num_draft_tokens, is_draft=True))
        return segments

    def run(self, layer: int, mixer: Mixer, projected: Tensor) -> Tensor:
        """Compute a layer's rows and update its states.

        Args:
            layer: Index among the recurrent layers of this rank.
            mixer: The layer.
            projected: Output of the layer's input projection, [rows, columns of `sections`].

        Returns:
            Input of the layer's output projection, [rows, output_width].
        """
        metadata = self.metadata
        assert metadata is not None, "begin comes before run"
        outputs = [self._scan(layer, mixer, projected, segment) for segment in metadata.segments]
        if len(metadata.generation_slots):
            slots = metadata.generation_slots
            rows = projected[metadata.generation_begin :]
            computed, states = mixer.step(rows, self._states(layer, slots))
            for part, state in zip(self.memory, states, strict=True):
                part[layer].index_copy_(0, slots, state)
                if len(metadata.snapshots):
                    saved = part[layer].index_select(0, metadata.saved_slots)
                    part[layer].index_copy_(0, metadata.snapshots, saved)
            outputs.append(computed)
        return mixer.finish(torch.cat(outputs))

    def _scan(self, layer: int, mixer: Mixer, projected: Tensor, segment: Segment) -> Tensor:
        rows = projected[segment.begin : segment.end]
        computed, state = _advance(mixer, rows, self._state(layer, segment.slot))
        if segment.is_draft:
            self.keep_drafts(segment.slot, partial(self._accept_rows, layer, mixer, segment.slot, rows))
            return computed
        self._store(layer, segment.slot, state)
        if segment.snapshot != _NO_SNAPSHOT:
            self._store(layer, segment.snapshot, state)
        return computed

    def keep_drafts(self, slot: int, advance: Callable[[int], None]) -> None:
        """Keep drafts of this batch until they are verified: if any are accepted, `advance` is called with their
        number and applies them to the slot's state."""
        self._drafts[slot].append(advance)

    def accept(self, batch: ScheduledBatch, output: ModelOutput, only: Collection[int] | None = None) -> None:
        """Apply accepted drafts to the states of all slots, or of the slots in `only`."""
        if not self._drafts:
            return
        for slot, token_ids in zip(batch.sampled_slots(), output.token_ids, strict=True):
            if only is not None and slot not in only:
                continue
            num_accepted = len(token_ids) - 1
            for advance in self._drafts.pop(slot, ()):
                if num_accepted > 0:
                    advance(num_accepted)

    def _accept_rows(self, layer: int, mixer: Mixer, slot: int, rows: Tensor, num_accepted: int) -> None:
        _, state = _advance(mixer, rows[:num_accepted], self._state(layer, slot))
        self._store(layer, slot, state)

    def _state(self, layer: int, row: int) -> State:
        conv, state = self.memory
        return conv[layer, row], state[layer, row]

    def _states(self, layer: int, rows: Tensor) -> State:
        conv, state = self.memory
        return conv[layer].index_select(0, rows), state[layer].index_select(0, rows)

    def _store(self, layer: int, row: int, state: State) -> None:
        for part, value in zip(self.memory, state, strict=True):
            part[layer, row] = value

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy states by (target, source) indices in the memory, all of them simultaneously."""
        if not pairs:
            return
        targets, sources = self._upload(pairs).unbind(1)
        for part in self.memory:
            part.index_copy_(1, targets, part.index_select(1, sources))

    def _upload(self, values: list[int] | list[tuple[int, int]]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self._device)


def _advance(mixer: Mixer, rows: Tensor, state: State) -> tuple[Tensor, State]:
    """Compute the next tokens of one sequence; a single token by `step`, which is faster."""
    if len(rows) > 1:
        return mixer.scan(rows, state)
    computed, (conv, states) = mixer.step(rows, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
    return computed, (conv.squeeze(0), states.squeeze(0))


def state_bytes(config: RecurrentConfig, num_layers: int, dtype: torch.dtype) -> int:
    """Return the size of one slot's or snapshot's state over all layers in bytes."""
    parts = empty_state(config, dtype, torch.device("meta"), num_layers)
    return sum(part.numel() * part.element_size() for part in parts)
