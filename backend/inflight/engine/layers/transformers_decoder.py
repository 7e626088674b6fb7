"""A decoder with transformers' own modelling code as its layers, over packed rows and KV blocks.

The model is called with all rows of a batch as one sequence, with their positions and without transformers' cache.
Every layer's attention calls the function `attend` of this module, which `transformers_model.py` registers with
transformers: it stores the rows' keys and values in their blocks, and lets every row attend to its own sequence.
Everything else in a layer is computed row by row. Used on the loop thread; does not import transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.attention.by_layer import AttendLayer, AttentionByLayer
from inflight.engine.attention.check import pack_rows
from inflight.engine.attention.interface import Attention
from inflight.engine.kv_cache import KvCache, cache_places
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig
from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.transfer import to_list


class AttentionHandler(ABC):
    """Handles the attention calls of a model's layers during a forward pass."""

    @abstractmethod
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Compute the attention output of every row, [1, rows, heads, head_dim].

        Args:
            module: The layer's attention module; its `layer_idx` is the layer's index.
            query: [1, heads, rows, head_dim].
            key: [1, kv_heads, rows, head_dim].
            value: [1, kv_heads, rows, head_dim].
            mask: The mask that `mask` returned, perhaps changed by the modelling code.
            options: Further arguments of the modelling code: scaling, sliding_window, softcap and others.
        """

    def mask(self, options: Mapping[str, Any]) -> Tensor | None:
        """Return the mask for the modelling code; None, as blocks and positions determine which keys a row
        sees."""
        return None


_HANDLER: ContextVar[AttentionHandler] = ContextVar("attention_handler")


@contextmanager
def handling_attention(handler: AttentionHandler) -> Generator[None]:
    """Let `handler` handle the attention calls of modelling code inside the `with` block, on this thread."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function for transformers' AttentionInterface; returns no attention weights."""
    return _HANDLER.get().attend(module, query, key, value, attention_mask, options), None


def make_mask(**options: Any) -> Tensor | None:
    """The mask function for transformers' AttentionMaskInterface."""
    return _HANDLER.get().mask(options)


@dataclass(frozen=True, slots=True)
class _BatchAttention(AttentionHandler):
    """Attention over the KV blocks of one batch's rows."""

    attention: Sequence[AttendLayer]
    places: Tensor
    cache: KvCache

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        queries, keys, values = (
            rows[0].transpose(0, 1).to(self.cache.dtype).contiguous() for rows in (query, key, value)
        )
        self.cache.write(layer, self.places, keys, values)
        read = self.attention[layer](queries, keys, values, layer)
        return read.view(1, *queries.shape).to(query.dtype)


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A loaded transformers model, and its properties as found by a trial.

    Attributes:
        decoder: The configuration for KV cache, attention and scheduler. Fields that describe the inside of a
            layer are meaningless, as transformers' code computes the layers.
        dtype: Data type of weights, activations and KV cache.
        body: Module that computes the last layer's output after the final norm, given token ids or embeddings, and
            positions.
        head: Module that computes logits from the body's output, passed as `inputs_embeds`.
        examples: Two sequences: token ids, and their logits [ids, vocab_size] float32 by the model's own
            attention.
    """

    decoder: DecoderConfig
    dtype: torch.dtype
    body: Any
    head: Any
    examples: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class TransformersDecoder:
    """A decoder with the methods and attributes of `Decoder`, but without adapters.

    Args:
        model: The model, which computes everything but attention.
        layer_windows: Attention window of each layer.
        attention: The attention over the KV cache.
    """

    kernels = "transformers"
    has_fixed_shapes = False
    needs_cleared_blocks = True
    row_kernels = RowKernels()

    def __init__(
        self,
        model: TransformersModel,
        layer_windows: tuple[AttentionWindow | None, ...],
        attention: Attention,
    ) -> None:
        self.config = model.decoder
        self.dtype = model.dtype
        self._body, self._head = model.body, model.head
        self._attention = AttentionByLayer(attention, layer_windows)

    def forward(
        self,
        packed: PackedBatch,
        cache: KvCache,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
    ) -> Tensor:
        """Compute the last layer's output after the final norm [rows, hidden_size], and fill the cache.

        `between` collects hidden states between layers. `hidden` is None, as there is only one stage.
        """
        wanted: Set[int] = between.wanted if between is not None else frozenset()
        handler = _BatchAttention(
            self._attention.prepare(packed, cache),
            cache_places(packed, cache.tokens_per_block),
            cache,
        )
        with handling_attention(handler):
            output = self._body(
                **self._inputs(packed),
                position_ids=packed.positions[None],
                use_cache=False,
                output_hidden_states=bool(wanted),
                return_dict=True,
            )
        if between is not None:
            for number in wanted:
                between.keep(number, output.hidden_states[number][0])
        return output.last_hidden_state[0]

    def forward_to_logits(self, packed: PackedBatch, cache: KvCache, hidden: Tensor | None = None) -> Tensor:
        return self.logits(self.forward(packed, cache, hidden), packed.sampled_rows)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] float32 of `forward`'s output `hidden` at the indices `rows` [n]
        int64."""
        return (
            self._head(inputs_embeds=hidden[rows][None], use_cache=False, return_dict=True).logits[0].float()
        )

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return rows of `forward`'s output unchanged, as the final norm is already applied."""
        return hidden

    def load_adapter(self, load: AdapterLoad) -> None:
        """Raise ValueError, as there are no pages for adapters."""
        raise ValueError(
            "an adapter was to be loaded, expected none: transformers' own code takes no adapters"
        )

    def _inputs(self, packed: PackedBatch) -> dict[str, Tensor]:
        """Return the modelling code's input: token ids, or embeddings if some rows come from prompt tables."""
        virtual = packed.virtual
        if virtual is None:
            return {"input_ids": packed.token_ids[None]}
        known = packed.token_ids.index_fill(0, virtual.rows, 0)
        embeddings = self._body.get_input_embeddings()(known)
        return {"inputs_embeds": embeddings.index_copy(0, virtual.rows, virtual.embeddings)[None]}


EXAMPLE_LENGTHS = (23, 11)
"""Numbers of tokens of the two sequences that `relative_error` computes."""


@torch.inference_mode()
def relative_error(decoder: TransformersDecoder, model: TransformersModel, tokens_per_block: int) -> float:
    """Return the error of the logits of two sequences, relative to the model's own attention.

    The two sequences share batches: first their contexts, the first one in two chunks, then their last tokens
    one by one. The error is large for a model with other state than keys and values, or other inputs than
    positions.

    Returns:
        The root mean square of the error, divided by the standard deviation of the logits.
    """
    (first, expected_first), (second, expected_second) = model.examples
    lengths = len(first), len(second)
    device = first.device
    blocks_each = -(-max(lengths) // tokens_per_block)
    cache = KvCache(model.decoder, 2 * blocks_each, tokens_per_block, model.dtype, device)
    tables = torch.arange(2 * blocks_each, device=device).view(2, blocks_each).flip(1)
    both = len(second) - 2
    batches = [
        pack_rows((PackedChunk(0, 0, 12, 0), PackedChunk(1, 12, 12 + both, 0)), (), (), tables),
        pack_rows((PackedChunk(0, 0, len(first) - 13, 12),), (1,), (len(second) - 1,), tables),
        pack_rows((), (0, 1), lengths, tables),
    ]
    ids, expected = (first, second), (expected_first, expected_second)
    errors: list[Tensor] = []
    scales: list[Tensor] = []
    for batch in batches:
        rows = list(zip(to_list(batch.slots), to_list(batch.positions), strict=True))
        token_ids = torch.stack([ids[slot][position] for slot, position in rows])
        found = decoder.forward_to_logits(replace(batch, token_ids=token_ids), cache)
        wanted = torch.stack([expected[slot][position] for slot, position in rows])
        errors.append(found - wanted)
        scales.append(wanted)
    return float(torch.cat(errors).square().mean().sqrt() / torch.cat(scales).std())
