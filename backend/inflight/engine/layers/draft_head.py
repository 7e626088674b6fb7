"""Draft heads, which guess the next tokens of sequences: the checkpoint's own (multi-token prediction, MTP).

A head has one decoder layer. For the token at position p it reads the token's embedding and a hidden state of
the model at p - 1, and guesses the token at p + 1. The layer attends to the same pairs of embedding and hidden
state at all positions from 1 to p. An MTP head reads the model's output after the final norm, and shares embedding
and output projection with the model. The other kinds of heads are in `eagle_head.py` and `gemma4_head.py`. Gemma
4's head has several layers, and computes no keys and values. Beside compiled layers the layer and projections of
MTP and EAGLE-3 heads are compiled too.

The layer's keys and values are one more layer of the KV cache, and the hidden states are stored there too: blocks
that are shared, copied or saved have all that the head needs. Forward passes store both for their rows, by `fill`.
For tokens that a sequence generates without drafts, it has zeros or older entries instead. To guess more than
one token, the head gets its own output in place of the hidden state. The keys and values that it stores then
are overwritten by the forward pass that verifies the guesses.

References: vLLM `qwen3_next_mtp.py` and `deepseek_mtp.py`, SGLang `deepseek_nextn.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.attention.gathering import gathering
from inflight.engine.interfaces import DraftedModel, DraftLayer
from inflight.engine.kv_cache import KvCache, cache_places
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.rotary_tables import RotaryTables
from inflight.engine.slots import SlotTable
from inflight.engine.windows import AttentionWindow
from inflight.models.decoder_weights import DraftHeadWeights, PlainWeights
from inflight.models.sharding import Part
from inflight.sampling.threads import single_thread
from inflight.sampling.transfer import as_array, as_tensor, upload


@dataclass(frozen=True, slots=True)
class _Guess:
    """A chunk whose draft tokens are to be guessed: how many, and the last known token with its position."""

    slot: int
    count: int
    token_id: int
    position: int


class DraftHead(ABC):
    """A draft head, which stores what it reads of a model's rows, and guesses draft tokens.

    Args:
        model: The decoder of the model.
        layer: The decoder of the head's layer, whose only window is `head_window`, or of its layers that read the
            model's keys and values.
        cache: The KV cache of a model with a draft head.

    Attributes:
        advances: Whether the head reads its own guesses at the positions that they would have. Otherwise it reads
            them at the position of the last known token.
    """

    advances = True

    def __init__(self, model: DraftedModel, layer: DraftLayer, cache: KvCache) -> None:
        self._model, self._layer = model, layer
        self._cache, self._hidden, self._size = cache.draft_layer(), cache.hidden, cache.tokens_per_block
        self._has_own_threads = layer.kernels == "native"

    def clear(self, block_ids: Tensor) -> None:
        """Zero the head's own keys and values, and hidden states, of blocks [n] that a sequence is about to use.

        What the head does not read stays zero, and attention of torch's operators needs zeros (`KvCache.clear`).
        """
        self._cache.clear(block_ids)

    def fill(
        self, packed: PackedBatch, slots: Sequence[int], hidden: Tensor, between: Mapping[int, Tensor]
    ) -> None:
        """Store entries, which are hidden states, keys and values, of a batch's rows.

        If the batch has prompt tables or rotary tables, all rows get entries.

        Args:
            packed: The rows.
            slots: The slots whose rows get entries, at least one.
            hidden: The output of the model's last layer, [rows, hidden_size].
            between: The hidden states after `Eagle3Config.read_layers`, [rows, hidden_size] each.
        """
        with single_thread(self._has_own_threads):
            self._fill(packed, slots, hidden, between)

    def _fill(
        self, packed: PackedBatch, slots: Sequence[int], hidden: Tensor, between: Mapping[int, Tensor]
    ) -> None:
        has_others = len(slots) < len(packed.bounds) - 1
        if has_others and packed.virtual is None and packed.rotations is None:
            is_read = torch.isin(packed.slots, upload(np.array(slots), packed.slots.device))
            packed, hidden = _take(packed, is_read, slots), hidden[is_read]
            between = {number: states[is_read] for number, states in between.items()}
        self._hidden.index_copy_(0, cache_places(packed, self._size), self._stored(hidden, between))
        self._fill_layer(packed)

    def _fill_layer(self, packed: PackedBatch) -> None:
        """Store the rows' keys and values in the head's own layer; their hidden states are stored."""
        packed = replace(self._of_layer(packed), adapters=None)  # adapters do not change the head
        self._layer.fill(packed, self._cache, self._read(packed, self._before(packed)))

    @abstractmethod
    def _stored(self, hidden: Tensor, between: Mapping[int, Tensor]) -> Tensor:
        """Return the hidden states that the head reads, [rows, hidden_size], from the arguments of `fill`."""

    @abstractmethod
    def _read(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        """Return what the layer's attention reads, before the layer's norm if it has one, for tokens with `hidden`
        [rows, hidden_size] before them."""

    @abstractmethod
    def _forward(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        """Return the layer's output [rows, hidden_size] for tokens with `hidden` before them, and fill the
        cache."""

    @abstractmethod
    def _next(self, output: Tensor) -> Tensor:
        """Return what stands for the hidden states of guessed tokens, given the layer's output at them."""

    @abstractmethod
    def _logits(self, output: Tensor) -> Tensor:
        """Return the logits of the next tokens, given the layer's output, [rows, tokens] float32."""

    def _token_ids(self, guesses: Tensor) -> Tensor:
        """Return the model's tokens for indices of the head's logits, [rows]."""
        return guesses

    def _choose(self, output: Tensor) -> Tensor:
        """Return the likeliest next tokens [rows], given the layer's output."""
        return self._token_ids(likeliest(self._logits(output)))

    def _of_layer(self, packed: PackedBatch) -> PackedBatch:
        """Return the rows as the head's layer rotates them."""
        return packed

    def guess(self, batch: ScheduledBatch, slots: SlotTable, rotary: RotaryTables) -> list[int]:
        """Return the tokens in place of GUESSED_ON_DEVICE, in the order of `context`; waits for the device.

        Args:
            batch: The batch, whose blocks are in the block tables of `slots`.
            slots: The slots.
            rotary: The slots' rotary tables.
        """
        wanted = [
            _Guess(
                chunk.slot,
                chunk.num_draft_tokens,
                chunk.known_tokens[-1],
                chunk.start + len(chunk.known_tokens) - 1,
            )
            for chunk in batch.context
            if chunk.is_guessed
        ]
        # as in `PackedBatch`, longer sequences first
        with single_thread(self._has_own_threads):
            found = self._guess(sorted(wanted, key=lambda each: -each.position), slots, rotary)
        return [token for each in wanted for token in found[each.slot]]

    def _guess(
        self, wanted: Sequence[_Guess], slots: SlotTable, rotary: RotaryTables
    ) -> dict[int, list[int]]:
        """Return the guessed tokens by slot."""
        device = slots.last_tokens.device
        tokens = upload(np.array([each.token_id for each in wanted]), device)
        rows, guessed = list(range(len(wanted))), list[Tensor]()
        hidden: Tensor | None = None
        for step in range(max(each.count for each in wanted)):
            kept = [place for place, row in enumerate(rows) if wanted[row].count > step]
            rows = [rows[place] for place in kept]
            if len(kept) < len(tokens):
                index = upload(np.array(kept), device)
                tokens, hidden = tokens[index], None if hidden is None else hidden[index]
            positions = np.array([wanted[row].position + step * self.advances for row in rows])
            packed = self._of_layer(
                _pack(tokens, [wanted[row].slot for row in rows], positions, slots, rotary)
            )
            output = self._forward(packed, self._before(packed) if hidden is None else hidden)
            hidden = self._next(output)
            tokens = self._choose(output)
            guessed.append(tokens)
        flat = iter(as_array(torch.cat(guessed).cpu()).tolist())
        found = {each.slot: list[int]() for each in wanted}
        for step in range(len(guessed)):
            for each in wanted:
                if each.count > step:
                    found[each.slot].append(next(flat))
        return found

    def _before(self, packed: PackedBatch) -> Tensor:
        """Return the hidden states at the positions before the rows, [rows, hidden_size]; undefined for rows at
        position 0."""
        before = replace(packed, positions=(packed.positions - 1).clamp(min=0))
        return self._hidden[cache_places(before, self._size)]


class MtpHead(DraftHead):
    """The checkpoint's own draft head.

    Args:
        model: The decoder of the model.
        layer: As for `DraftHead`, without output projection.
        projection: Computes `DraftHeadWeights.projection`.
        weights: The weights of the head.
        cache: The KV cache of a model with a draft head.
    """

    def __init__(
        self,
        model: DraftedModel,
        layer: DraftLayer,
        projection: Callable[[Tensor], Tensor],
        weights: DraftHeadWeights[Any, Any],
        cache: KvCache,
    ) -> None:
        super().__init__(model, layer, cache)
        self._projection, self._weights = projection, weights
        self._logits_of_model = model.logits_after(weights.final_norm)

    def _stored(self, hidden: Tensor, between: Mapping[int, Tensor]) -> Tensor:
        return self._model.normalize(hidden)

    def _forward(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        return self._layer.forward(packed, self._cache, self._read(packed, hidden))

    def _read(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        weights, eps = self._weights, self._model.config.norm_eps
        embedded = apply_norm(self._model.embed(packed), weights.embedding_norm, eps)
        return self._projection(torch.cat([embedded, apply_norm(hidden, weights.hidden_norm, eps)], dim=-1))

    def _next(self, output: Tensor) -> Tensor:
        return apply_norm(output, self._weights.final_norm, self._model.config.norm_eps)

    def _logits(self, output: Tensor) -> Tensor:
        return self._logits_of_model(output)


def head_window(model: DraftedModel) -> AttentionWindow:
    """Return the window of a draft head's layer: there is no hidden state before the first token, so the pair at
    position 0 is never read."""
    return AttentionWindow(model.max_sequence_length, begin=1)


def make_layer(model: DraftedModel, weights: PlainWeights, part: Part) -> Decoder:
    """Return a decoder of a draft head's only layer on torch's operators.

    Args:
        model: The decoder of the model.
        weights: The layer, and the final norm and the output projection if `part` is the last stage.
        part: The rank's part of the head.
    """
    config = model.config.draft_layer
    return Decoder(
        config,
        weights,
        (head_window(model),),
        model.max_sequence_length,
        part,
        model.collectives,
        gathering(part.held_config(config)),
    )


def _pack(
    tokens: Tensor,
    of_slots: Sequence[int],
    positions: NDArray[np.int64],
    slots: SlotTable,
    rotary: RotaryTables,
) -> PackedBatch:
    """Return generation rows of these slots, longer sequences first."""
    device, count = tokens.device, len(of_slots)
    rows = upload(np.array([of_slots, positions]), device)
    every = torch.arange(count + 1, device=device)
    return PackedBatch(
        token_ids=tokens,
        positions=rows[1],
        slots=rows[0],
        sampled_rows=every[:count],
        bounds=every,
        chunks=(),
        generation_begin=0,
        generation_lengths=positions + 1,
        block_tables=slots.block_tables,
        rotations=rotary.rotations(list(of_slots), positions.tolist()),
    )


def _take(packed: PackedBatch, is_taken: Tensor, slots: Sequence[int]) -> PackedBatch:
    """Return the rows of some slots, without sampled rows and adapters.

    Args:
        packed: Rows, of which none is virtual or has a rotary table.
        is_taken: Whether each row is of one of `slots`.
        slots: The slots.
    """
    chunks, begin = list[PackedChunk](), 0
    for chunk in packed.chunks:
        if chunk.slot in slots:
            chunks.append(replace(chunk, begin=begin, end=begin + chunk.end - chunk.begin))
            begin = chunks[-1].end
    lengths = packed.generation_lengths[as_array(is_taken[packed.generation_begin :].cpu())]
    bounds = [*(chunk.begin for chunk in chunks), *range(begin, begin + len(lengths) + 1)]
    return replace(
        packed,
        token_ids=packed.token_ids[is_taken],
        positions=packed.positions[is_taken],
        slots=packed.slots[is_taken],
        sampled_rows=packed.sampled_rows[:0],
        bounds=upload(np.array(bounds), packed.slots.device),
        chunks=tuple(chunks),
        generation_begin=begin,
        generation_lengths=lengths,
        adapters=None,
        ends=None,
    )


def likeliest(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return as_tensor(as_array(logits).argmax(axis=-1))  # in a tenth of torch's time
