"""NativeDecoder runs the model with compiled layers (source/decoder.h), with the same results as `Decoder`.

One call runs all layers over all rows; if ranks share layers, a call runs half a layer, and the ranks' results are
summed between calls. Keys and values are stored in the cache's blocks in a special order. Loop thread.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inflight import environment
from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.collectives import ALONE, Collectives, join_logits
from inflight.engine.cpu import layout
from inflight.engine.cpu.adapters import PackedAdapters
from inflight.engine.cpu.packing import Contribution, PackedLayer, PackedLinear, Packer
from inflight.engine.cpu.row_kernels import NativeRowKernels
from inflight.engine.cpu.structs import (
    BatchStruct,
    Handle,
    LatentShapeStruct,
    LayerStruct,
    NormStruct,
    RecurrentShapeStruct,
    RoutedStruct,
    ShapeStruct,
)
from inflight.engine.host_memory import Recycled
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS, KvQuantization
from inflight.engine.layers.embedding import embed
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.packing import PackedBatch
from inflight.engine.recurrent.states import RecurrentStates
from inflight.engine.windows import AttentionWindow
from inflight.errors import ConfigError
from inflight.models import DecoderConfig
from inflight.models.decoder_config import ClampedSwiglu, ExpertsConfig, LatentAttention
from inflight.models.decoder_weights import DecoderWeights, Norm
from inflight.models.recurrent import GatedDelta, Mamba2, RecurrentConfig, ShortConv, total_size
from inflight.models.rope_tables import query_factors, rope_tables
from inflight.models.sharding import Part
from inflight.sampling.nan_check import Peaks
from inflight.sampling.transfer import as_array

_CACHE_KINDS = {None: layout.AS_COMPUTED, INT8_LEVELS: layout.INT8_CACHE, FP8_LEVELS: layout.FP8_CACHE}
_ATTENTION, _MLP = 0, 1  # halves of a layer
RECURRENT_KINDS: dict[type[RecurrentConfig], int] = {
    ShortConv: layout.SHORT_CONV,
    GatedDelta: layout.GATED_DELTA,
    Mamba2: layout.MAMBA2,
}
"""Kinds of recurrent layers that the compiled code supports, by the types of their configurations."""
_SPIN_VARIABLE = "INFLIGHT_CPU_SPIN_US"
_SPIN_US = 50


class NativeDecoder:
    """A decoder over the packed weights of a model or of a part of it.

    Args:
        config: Configuration of the whole model.
        weights: Weights of this part; its layers come from `Packer.layer`, its output projection from
            `Packer.linear`.
        packer: Packs the remaining weights.
        layer_windows: As for `Decoder`.
        max_sequence_length: As for `Decoder`.
        tokens_per_block: Block size of the cache that every call passes.
        part: As for `Decoder`.
        collectives: As for `Decoder`.
        quantization: 8-bit format of the cache that every call passes; None: not quantized.
        num_mapped_bytes: Bytes of weights that are mapped from a file, and so need page cache.
        widest_operand: Width of the widest input of `linear` and of `read` in `forward`; 0: neither is used.
        beside: A decoder that shares its threads with this one; the two never run at the same time. None: this one
            has its own threads.

    Raises:
        ConfigError: The threads cannot be started, or INFLIGHT_CPU_SPIN_US is not a number of microseconds.

    Attributes:
        config: Configuration of the whole model.
        dtype: Dtype of activations, and of a KV cache that is not quantized.
        packer, part, collectives, max_sequence_length: The arguments of the same names.
        kernels: As for `Decoder`.
        has_fixed_shapes: As for `Decoder`.
        needs_cleared_blocks: As for `Decoder`.
        row_kernels: As for `Decoder`.
        num_mapped_bytes: The argument of the same name.
    """

    kernels = "native"
    has_fixed_shapes = False

    # Positions after a sequence's last token are masked, or set to zero when the last token is stored.
    needs_cleared_blocks = False

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights[PackedLayer, PackedLinear],
        packer: Packer,
        layer_windows: tuple[AttentionWindow | None, ...],
        max_sequence_length: int,
        tokens_per_block: int,
        part: Part,
        collectives: Collectives = ALONE,
        quantization: KvQuantization | None = None,
        num_mapped_bytes: int = 0,
        widest_operand: int = 0,
        beside: NativeDecoder | None = None,
    ) -> None:
        self.config = config
        self.num_mapped_bytes = num_mapped_bytes
        self.dtype = packer.dtype
        self._library = packer.library
        self.instruction_set = packer.library.target
        self._num_threads = packer.num_threads
        self._vocabulary = part.shard.split(config.vocab_size)
        self.part, self.collectives, self.max_sequence_length = part, collectives, max_sequence_length
        self._packed = weights.layers
        self._first_layer = part.layers[0]
        self._layers = (LayerStruct * len(self._packed))(*(layer.struct for layer in self._packed))
        held = part.held_config(config)
        self._position_embedding = weights.position_embedding
        self._embedding = weights.embedding  # None also if its rows are the output projection's columns
        if weights.lm_head is not None and weights.final_norm is not None:
            self._lm_head, self._lm_head_tensors = weights.lm_head.struct, weights.lm_head.tensors
            self._final_norm, self._final_norm_tensors = packer.norm(weights.final_norm)
        self._norm = weights.final_norm
        self.packer = packer
        self._set_positions(held, layer_windows[slice(*part.layers)], max_sequence_length)
        self._adapters = PackedAdapters(packer.library, config, part, self.dtype)
        self._logits_memory = Recycled()
        self._cache: KvCache | None = None
        self._quantization = quantization
        self._latent = _describe_latent(config.latent)
        self._shape = self._describe(held, tokens_per_block, widest_operand)
        self._handle = Handle(
            self._library, self._shape, self._layers, None if beside is None else beside._handle
        )
        if not self._handle.exists:
            raise ConfigError(
                f"{self._num_threads} threads for the forward pass cannot be started, or have no memory: "
                "lower engine_threads, or raise this process's limits"
            )
        self.row_kernels = NativeRowKernels(self._library, self._handle)

    def _set_positions(
        self, held: DecoderConfig, windows: tuple[AttentionWindow | None, ...], max_sequence_length: int
    ) -> None:
        """Describe to the library what depends on positions in each of this rank's layers.

        The layers are those of `held`. Their rotary tables and factors of queries stay in this object.
        """
        for layer, window in zip(self._layers, windows, strict=True):
            if window is not None:
                layer.recent, layer.sinks, layer.first = window.recent, window.sinks, window.begin
        for layer, is_bidirectional in zip(self._layers, held.bidirectional_layers):
            layer.is_bidirectional = is_bidirectional
        self._rope_tables = {
            rope: rope_tables(rope, held.rotary_head_dim, max_sequence_length)
            for rope in dict.fromkeys(held.ropes)
            if rope is not None
        }
        for layer, rope in zip(self._layers, held.ropes, strict=True):
            if rope is not None:
                layer.cos, layer.sin = (table.data_ptr() for table in self._rope_tables[rope])
        if held.attention_temperature is not None:
            self._query_factors = query_factors(held.attention_temperature, max_sequence_length)
            for index, layer in enumerate(self._layers):
                if held.has_temperature(index):
                    layer.query_factors = self._query_factors.data_ptr()

    def forward(
        self,
        packed: PackedBatch,
        cache: KvCache,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Compute this rank's layers; a library call ends at each layer whose hidden states are wanted.

        `read` is attention's input [rows, 2 * hidden_size] in the only layer of an EAGLE-3 head.
        """
        batch, x = self._begin(packed, cache, hidden)
        if read is not None:
            read = read.contiguous()
            batch.read = read.data_ptr()
        _check(self._library.prepare(self._handle, batch, None, 0))
        between = between or HiddenStates()
        virtual = packed.virtual
        num_added = 0 if virtual is None else len(virtual.added)
        if self.collectives.size == 1:
            for begin, end in itertools.pairwise(self._stops(between, num_added)):
                between.keep(self._first_layer + begin, x)
                self._run(batch, x, begin, end)
                if virtual is not None:
                    virtual.add_after(self._first_layer + end - 1, x)
            return x
        partial = torch.empty_like(x)
        for index, layer in enumerate(self._packed):
            between.keep(self._first_layer + index, x)
            for half, contribution in ((_ATTENTION, layer.attention), (_MLP, layer.mlp)):
                self._run(batch, x, index, index + 1, partial, half)
                self._take(x, self.collectives.all_reduce(partial), contribution)
            if virtual is not None:
                virtual.add_after(self._first_layer + index, x)
        return x

    def fill(self, packed: PackedBatch, cache: KvCache, hidden: Tensor) -> None:
        """Store keys and values of the only layer as `Decoder.fill` does, for rows without adapters.

        In an EAGLE-3 head, `hidden` [rows, 2 * hidden_size] is attention's input.
        """
        batch, x = self._begin(packed, cache, hidden)
        if x.shape[1] > self.config.hidden_size:
            batch.read = x.data_ptr()
        _check(self._library.prepare(self._handle, batch, x.data_ptr(), 0))
        self._run(batch, x, 0, 1, None if self.collectives.size == 1 else torch.empty_like(x), _ATTENTION)

    def linear(self, linear: PackedLinear) -> Callable[[Tensor], Tensor]:
        """Return a function that computes a packed linear layer outside of the layers, for inputs [rows, any]."""

        def apply(x: Tensor) -> Tensor:
            x = x.contiguous()
            out = torch.empty(len(x), linear.struct.columns, dtype=self.dtype)
            is_done = self._library.product(
                self._handle, linear.struct, x.data_ptr(), *x.shape, out.data_ptr()
            )
            _check(is_done)
            return out

        return apply

    def draft_layer(
        self, weights: DecoderWeights[PackedLayer, PackedLinear], window: AttentionWindow, part: Part
    ) -> NativeDecoder:
        """Return a decoder of a draft head's only layer, for the same ranks and block size.

        It computes linear layers whose inputs are at most 3 * hidden_size wide.
        """
        return NativeDecoder(
            self.config.draft_layer,
            weights,
            self.packer,
            (window,),
            self.max_sequence_length,
            self._shape.tokens_per_block,
            part,
            self.collectives,
            self._quantization,
            widest_operand=3 * self.config.hidden_size,
            beside=self,
        )

    def _take(self, x: Tensor, total: Tensor, of: Contribution) -> None:
        """Add the sum over ranks of attention's or the MLP's output to the residual stream."""
        if of.bias is not None:
            total = total + of.bias
        if of.post_norm is not None:
            total = apply_norm(total, of.post_norm, self.config.norm_eps)
        x.add_(total, alpha=self.config.residual_scale)

    def forward_to_logits(self, packed: PackedBatch, cache: KvCache, hidden: Tensor | None = None) -> Tensor:
        """Compute layers and logits in one library call, as the code evicts Python's from the CPU's caches.

        The call also finds the largest logit of each row, for `row_kernels`.
        """
        if self.collectives.size > 1 or (packed.virtual is not None and packed.virtual.added):
            return self.logits(self.forward(packed, cache, hidden), packed.sampled_rows)
        batch, x = self._begin(packed, cache, hidden)
        rows = packed.sampled_rows
        logits = self._logits_memory.empty((len(rows), self._lm_head.columns), torch.float32)
        peaks = Peaks(torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64))
        head = (self._final_norm, self._lm_head)
        is_done = self._library.run_to_logits(
            self._handle,
            batch,
            x.data_ptr(),
            len(self._layers),
            *head,
            rows.data_ptr(),
            len(rows),
            logits.data_ptr(),
            peaks.highest.data_ptr(),
            peaks.tokens.data_ptr(),
        )
        _check(is_done)
        self.row_kernels.note_peaks(logits, peaks)
        return logits

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._logits_after(self._final_norm, hidden, rows)

    def logits_after(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states to logits as `Decoder.logits_after` does."""
        struct, tensors = self.packer.norm(norm)

        def logits(hidden: Tensor) -> Tensor:
            assert tensors, "the struct points to these tensors"
            return self._logits_after(struct, hidden, torch.arange(len(hidden)))

        return logits

    def _logits_after(self, norm: NormStruct, hidden: Tensor, rows: Tensor) -> Tensor:
        hidden, rows = hidden.contiguous(), rows.contiguous()
        logits = self._logits_memory.empty((len(rows), self._lm_head.columns), torch.float32)
        parameters = (norm, self._lm_head)
        is_done = self._library.logits(
            self._handle, *parameters, hidden.data_ptr(), rows.data_ptr(), len(rows), logits.data_ptr()
        )
        _check(is_done)
        return join_logits(logits, self.config.vocab_size, self.collectives)

    def load_adapter(self, load: AdapterLoad) -> None:
        self._adapters.load(load)

    def embed(self, packed: PackedBatch) -> Tensor:
        """Return the rows' embeddings [rows, hidden_size], the first layer's input; at the first stage."""
        learned = self._position_embedding
        return embed(packed, self.config, self._vocabulary, self._look_up, self.collectives, learned)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the final norm with torch's operators."""
        assert self._norm is not None, "the last stage has the final norm"
        return apply_norm(hidden, self._norm, self.config.norm_eps)

    def _stops(self, between: HiddenStates, num_added: int = 0) -> list[int]:
        """Return the first layer of each library call, followed by the number of layers; after each of the whole
        model's first `num_added` layers a call ends."""
        count = len(self._layers)
        inner = {stop - self._first_layer for stop in (*between.wanted, *range(1, num_added + 1))}
        return [0, *sorted(stop for stop in inner if 0 < stop < count), count]

    def _begin(
        self, packed: PackedBatch, cache: KvCache, hidden: Tensor | None
    ) -> tuple[BatchStruct, Tensor]:
        """Return the batch's struct, which points into the arguments, and the first layer's input: `hidden`, or
        the embeddings."""
        self._bind(cache)
        spans, positions, slots = _spans(packed), packed.positions, packed.slots
        batch = BatchStruct(
            len(positions),
            positions.data_ptr(),
            slots.data_ptr(),
            len(spans),
            spans.ctypes.data,
            packed.block_tables.data_ptr(),
            packed.block_tables.shape[1],
        )
        batch.spans_array = spans  # lives as long as the batch
        if packed.rotations is not None:
            (table,) = self._rope_tables.values()  # a model with mRoPE has one kind of positions
            batch.rotations = packed.rotations.of_rows(*table)  # lives as long as the batch
            batch.cos, batch.sin = (each.data_ptr() for each in batch.rotations)
        if packed.ends is not None:
            batch.ends_array = packed.ends  # lives as long as the batch
            batch.ends = packed.ends.ctypes.data
        if packed.adapters is not None:
            batch.adapters_array = self._adapters.addresses(packed.adapters)  # lives as long as the batch
            batch.adapters = batch.adapters_array.ctypes.data
        if cache.states is not None:
            self._add_segments(batch, cache.states)
        return batch, self.embed(packed) if hidden is None else hidden.contiguous()

    def _add_segments(self, batch: BatchStruct, states: RecurrentStates) -> None:
        """Add the rows of `states.metadata` to the batch, with memory for the rows of drafts."""
        metadata = states.metadata
        assert metadata is not None, "RecurrentStates.begin is called before forward"
        segments: list[tuple[int, ...]] = []
        drafts: list[tuple[int, int]] = []  # slot and first kept row
        num_kept = 0
        for each in metadata.segments:
            segments.append(
                (each.slot, each.begin, each.end, each.snapshot, num_kept if each.is_draft else -1)
            )
            if each.is_draft:
                drafts.append((each.slot, num_kept))
                num_kept += each.end - each.begin
        saved = dict(
            zip(as_array(metadata.saved_slots).tolist(), as_array(metadata.snapshots).tolist(), strict=True)
        )
        for row, slot in enumerate(as_array(metadata.generation_slots).tolist(), metadata.generation_begin):
            segments.append((slot, row, row + 1, saved.get(slot, -1), -1))
        batch.segments_array = _segments(segments)  # lives as long as the batch
        batch.num_segments, batch.segments = len(segments), batch.segments_array.ctypes.data
        if drafts:
            kept = torch.empty(len(self._layers), num_kept, self._shape.recurrent.projected, dtype=self.dtype)
            batch.kept, batch.num_kept = kept.data_ptr(), num_kept
            for slot, first in drafts:
                states.keep_drafts(slot, partial(self._accept, kept, slot, first))

    def _accept(self, kept: Tensor, slot: int, first: int, num_accepted: int) -> None:
        """Advance a slot's state by accepted drafts, whose rows in `kept` begin at `first`."""
        num_layers, num_kept, _ = kept.shape
        segments = _segments([(slot, first, first + num_accepted, -1, -1)])
        is_done = self._library.accept(
            self._handle, segments.ctypes.data, len(segments), kept.data_ptr(), num_kept, num_layers
        )
        _check(is_done)

    def _run(
        self,
        batch: BatchStruct,
        x: Tensor,
        first: int,
        last: int,
        partial: Tensor | None = None,
        half: int = 0,
    ) -> None:
        target = None if partial is None else partial.data_ptr()
        _check(self._library.run(self._handle, batch, x.data_ptr(), first, last, target, half))

    def routed(self) -> RoutedStruct:
        """Return the time spent on routing and the number of experts whose weights were read, since this decoder
        was created."""
        routed = RoutedStruct()
        self._library.read_routed(self._handle, routed)
        return routed

    def _describe(self, held: DecoderConfig, tokens_per_block: int, widest_operand: int) -> ShapeStruct:
        experts = held.experts or ExpertsConfig(0, 0, 0, False, ())
        swiglu = held.clamped_swiglu or ClampedSwiglu(alpha=0.0, limit=0.0)
        return ShapeStruct(
            held.hidden_size,
            held.num_heads,
            held.num_kv_heads,
            held.head_dim,
            held.intermediate_size,
            tokens_per_block,
            held.gated_mlp,
            layout.ACTIVATIONS[held.activation],
            self._num_threads,
            max((rope.rotary_dim(held.rotary_head_dim) for rope in self._rope_tables), default=0),
            held.qk_norm == "projection",
            held.norms_rotated,
            held.parallel_residual,
            experts.count,
            experts.num_per_token,
            experts.intermediate_size,
            experts.shared_intermediate_size,
            experts.is_normalized,
            experts.scoring == "sigmoid",
            experts.num_groups,
            experts.num_groups_per_token,
            experts.scores_per_group,
            _CACHE_KINDS[self._quantization],
            _spin_us(),
            held.attention_gate,
            widest_operand,
            held.norm_eps,
            held.score_scale,
            held.attention_soft_cap or 0.0,
            held.residual_scale,
            held.logits_scale,
            held.logits_soft_cap or 0.0,
            experts.result_scale,
            swiglu.limit,
            swiglu.alpha,
            None if self._latent is None else ctypes.addressof(self._latent),
            RecurrentShapeStruct() if held.recurrent is None else _describe_recurrent(held.recurrent),
        )

    def _bind(self, cache: KvCache) -> None:
        """Set the layers' pointers into the cache and the states, whose memory stays at the same addresses."""
        if cache is self._cache:
            return
        assert cache.quantization == self._quantization, "the cache has the format passed to __init__"
        self._cache = cache
        with_attention = [layer for layer in self._layers if layer.recurrent.conv is None]
        for layer, (keys, values) in zip(with_attention, cache.layers):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        for layer, (keys, values) in zip(with_attention, cache.layer_scales):
            layer.key_scales, layer.value_scales = keys.data_ptr(), values.data_ptr()
        if cache.states is not None:
            recurrent = [layer.recurrent for layer in self._layers if layer.recurrent.conv is not None]
            for layer, conv, state in zip(recurrent, *cache.states.memory, strict=True):
                layer.conv_states, layer.states = conv.data_ptr(), state.data_ptr()

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(token_ids, self._embedding)
        x = torch.empty(len(token_ids), self.config.hidden_size, dtype=self.dtype)
        token_ids = token_ids.contiguous()
        self._library.unpack_rows(
            self._handle, self._lm_head, token_ids.data_ptr(), len(token_ids), x.data_ptr()
        )
        return x


def _describe_latent(latent: LatentAttention | None) -> LatentShapeStruct | None:
    if latent is None:
        return None
    return LatentShapeStruct(
        latent.query_rank or 0,
        latent.kv_rank,
        latent.nope_head_dim,
        latent.rope_head_dim,
        latent.value_head_dim,
        latent.interleaved,
        latent.norm_eps,
    )


def _spans(packed: PackedBatch) -> NDArray[np.int64]:
    """Return [spans, 4] int64: slot, first row, row after the last, first position. Chunks, then generation."""
    first = packed.generation_begin
    spans = [(chunk.slot, chunk.begin, chunk.end, chunk.start) for chunk in packed.chunks]
    slots, lengths = as_array(packed.slots)[first:].tolist(), packed.generation_lengths.tolist()
    spans += [
        (slot, row, row + 1, length - 1) for row, (slot, length) in enumerate(zip(slots, lengths), first)
    ]
    return np.array(spans, dtype=np.int64)


def _segments(segments: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """Return the segments as an array [segments, 5] int64, each row a Segment of source/layer.h."""
    return np.array(segments, dtype=np.int64).reshape(-1, layout.SEGMENT_FIELDS)


def _describe_recurrent(config: RecurrentConfig) -> RecurrentShapeStruct:
    """Return the sizes of a rank's part of the recurrent layers, for the library."""
    shape = RecurrentShapeStruct(
        RECURRENT_KINDS[type(config)],
        conv_width=config.conv_width,
        conv_columns=total_size(config.conv_sections),
        projected=total_size(config.sections),
        output=config.output_width,
    )
    if isinstance(config, ShortConv):
        return shape
    shape.eps = config.norm_eps
    shape.heads, shape.key_dim, shape.value_dim = config.state_shape
    if isinstance(config, GatedDelta):
        shape.key_heads, shape.beta_scale = config.num_key_heads, config.beta_scale
    elif isinstance(config, Mamba2):
        shape.key_heads = config.num_groups
        shape.least_step, shape.most_step = config.step_limit
    return shape


def _check(is_done: bool) -> None:
    if not is_done:
        raise MemoryError("no memory for a forward pass's intermediate results")


def _spin_us() -> int:
    """Return how long a thread spins at a barrier before it sleeps, in microseconds (INFLIGHT_CPU_SPIN_US).

    Raises:
        ConfigError: The variable's value is not a number from 0 to a million.
    """
    return int(environment.read(_SPIN_VARIABLE) or _SPIN_US)
