"""The forward pass in torch's operators, one class for all families.

A pipeline stage has some of the layers, and starts from the output of the previous stage. Embedding and logits,
of which each rank may have a part of the vocabulary, are used by compiled layers too.

Everything specific to a family was resolved when the checkpoint was read; the branches in this module depend on
fields of DecoderConfig.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.adapter_pool import ActiveAdapters, AdapterPool
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.attention.by_layer import AttendLayer, AttentionByLayer
from inflight.engine.attention.gathering import GATHERING
from inflight.engine.attention.interface import Attention
from inflight.engine.collectives import ALONE, Collectives, join_logits
from inflight.engine.kv_cache import KvCache, cache_places
from inflight.engine.layers.altup import ResidualStreams, add_low_rank, drop_small_gates, split_streams
from inflight.engine.layers.embedding import embed as embed_rows
from inflight.engine.layers.experts import mix_experts
from inflight.engine.layers.layer_operations import ACTIVATIONS, LayerOperations, apply_norm, rotate
from inflight.engine.packing import PackedBatch, TileLimits, tile_limits
from inflight.engine.recurrent.mixers import Mixer, make_mixer
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig
from inflight.models.decoder_config import LatentAttention
from inflight.models.decoder_weights import (
    ExpertNorms,
    ExpertWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    Norm,
    PlainWeights,
)
from inflight.models.recurrent import RecurrentWeights
from inflight.models.rope_config import RopeConfig
from inflight.models.rope_tables import query_factors, rope_tables
from inflight.models.sharding import Part
from inflight.sampling.row_kernels import RowKernels

_BY_TORCH = RowKernels()


class Decoder:
    """A model or a part of one: its weights and the tables of its rotary positions.

    Args:
        config: The checkpoint's configuration.
        weights: The weights of the model, or of this part of it.
        layer_windows: Attention window of each layer of the whole model, used instead of `config.sliding_windows`.
        max_sequence_length: Longest sequence in tokens.
        part: The part of the model; None: all of it.
        collectives: Collectives over the ranks that share these layers; all these ranks run the same batches.
        attention: The attention over the KV cache.
        picture_attention: The attention for batches with pictures whose tokens attend to each other in both
            directions; None: `attention`.
        operations: The operations between matrix products and attention; None: in torch's operators.
        row_kernels: See the attribute.

    Attributes:
        config: The configuration of the whole model.
        dtype: Data type of activations and KV cache, and of weights that are not quantized.
        adapters: The LoRA adapters on the device; None: adapters are not enabled.
        kernels: Name of the implementation of the layers.
        has_fixed_shapes: See `Attention`; False with experts, recurrent layers or a draft head.
        takes_fixed_rows: See `Attention`.
        needs_cleared_blocks: Whether the previous content of a KV block may affect the next sequence that uses it.
        row_kernels: Kernels on rows of logits, for sampling.
        weights, part, collectives, max_sequence_length: The arguments of the same names.
    """

    kernels = "torch"
    needs_cleared_blocks = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: PlainWeights,
        layer_windows: tuple[AttentionWindow | None, ...],
        max_sequence_length: int,
        part: Part | None = None,
        collectives: Collectives = ALONE,
        attention: Attention = GATHERING,
        operations: LayerOperations | None = None,
        row_kernels: RowKernels = _BY_TORCH,
        picture_attention: Attention | None = None,
    ) -> None:
        part = part or Part.whole(config)
        self.config = config
        self.adapters: AdapterPool | None = None
        self.has_fixed_shapes = attention.has_fixed_shapes and _can_have_fixed_shapes(config)
        self.takes_fixed_rows = self.has_fixed_shapes and attention.takes_fixed_rows
        self.part = part
        self._held = part.held_config(config)
        self._operations = operations or LayerOperations(self._held)
        self.row_kernels = row_kernels
        self._vocabulary = part.shard.split(config.vocab_size)
        self.collectives = collectives
        self._first_layer = part.layers[0]
        self._places, self._state_places = _places(self._held), _state_places(self._held)
        self._mixers = [self._make_mixer(layer.recurrent) for layer in weights.layers]
        self._attention = AttentionByLayer(
            attention,
            layer_windows[slice(*part.layers)],
            self._held.bidirectional_layers,
            max_sequence_length,
            picture_attention,
        )
        self.weights = weights
        self.max_sequence_length = max_sequence_length
        first = weights.layers[0]
        any_linear = first.input_projection or first.up or (first.experts and first.experts.router)
        assert any_linear is not None, "every layer has a linear layer"
        self.dtype, self._device = any_linear.dtype, any_linear.weight.device
        self._section_factors = self._find_section_factors()
        ones = torch.ones(config.head_dim, dtype=self.dtype, device=self._device)
        self._plain_norm = Norm(ones) if config.qk_norm == "unweighted" else None
        self._sizes = [self._held.at(layer) for layer in range(self._held.num_layers)]
        self._layer_ropes = [
            rope and (rope, sizes.rotary_head_dim)
            for rope, sizes in zip(self._held.ropes, self._sizes, strict=True)
        ]
        self._rope_tables = {
            rope: tuple(table.to(self._device) for table in rope_tables(*rope, max_sequence_length))
            for rope in dict.fromkeys(self._layer_ropes)
            if rope is not None
        }
        temperature = config.attention_temperature
        self._query_factors = None
        if temperature is not None:
            self._query_factors = query_factors(temperature, max_sequence_length).to(self._device)

    def _make_mixer(self, weights: RecurrentWeights | None) -> Mixer | None:
        """Return the recurrent part of a layer; None if the layer has none."""
        if self._held.recurrent is None or weights is None:
            return None
        name = self.config.recurrent_activation
        activation = self._operations.activation if name is None else ACTIVATIONS[name]
        sum_over_ranks, operations = self.collectives.all_reduce, self._operations.recurrent
        return make_mixer(self._held.recurrent, weights, activation, sum_over_ranks, operations)

    def _find_section_factors(self) -> Tensor | None:
        """Return the factors of the outputs of recurrent layers' input projections, [columns]; None: all are 1."""
        factors, recurrent = self.config.multipliers, self._held.recurrent
        if factors is None or recurrent is None or not factors.recurrent_sections:
            return None
        sections = zip(recurrent.sections, factors.recurrent_sections, strict=True)
        columns = [torch.full((section.size,), factor) for section, factor in sections]
        return torch.cat(columns).to(self._device, self.dtype)

    def tile_limits(self, num_rows: int, num_chunks: int) -> TileLimits:
        """Return the limits as `RecordedDecoder.tile_limits` does; this decoder takes batches of any size."""
        return tile_limits(num_rows, num_chunks)

    def forward(
        self,
        packed: PackedBatch,
        cache: KvCache,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
        active: ActiveAdapters | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Compute the last layer's output [rows, hidden_size], and fill the cache.

        Before the last stage, the output is what the next stage needs: [rows, `DecoderConfig.stage_width`].

        Args:
            packed: The rows.
            cache: The KV cache.
            hidden: The previous stage's output; None at the first stage.
            between: Collects hidden states between layers.
            active: The rows' adapters; None: the adapters that `packed` names.
            read: The input of the first layer's norm, if it is not `hidden`; for a draft head.

        Raises:
            ValueError: An adapter that `packed` names is not loaded.
        """
        weights = self.weights
        if active is None and packed.adapters is not None:
            active = self._pool().activate(packed.adapters)
        attention = self._attention.prepare(packed, cache)
        places = cache_places(packed, cache.tokens_per_block)
        x, embedded, streams = self._start_layers(packed, hidden)
        inputs = self._layer_inputs(packed, embedded)
        read = self._norm(x if read is None else read, weights.layers[0].first_norm)
        rotations = self._rotations(packed)
        query_factors = None if self._query_factors is None else self._query_factors[packed.positions]
        # The rows' keys and values, by index of the layer among layers with attention.
        own: dict[int, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(weights.layers):
            if between is not None:
                between.keep(self._first_layer + index, x)
            if active is not None:
                layer = active.adapt(index, layer)
            following = weights.layers[index + 1].first_norm if index + 1 < len(weights.layers) else None
            beside = self._norm(x, layer.mlp_norm) if self.config.parallel_residual else None
            if layer.input_projection is not None:
                mixed = self._recur(read, index, layer, cache)
                if self._held.has_attention(index):
                    rotation = rotations.get(self._layer_ropes[index])
                    attended = self._attend(
                        read, rotation, index, layer, places, attention[index], cache, own, query_factors
                    )
                    mixed = attended if mixed is None else attended + mixed
                assert mixed is not None, "the layer has attention or a recurrent state"
                after = layer.mlp_norm if layer.has_mlp else following
                x, read = self._end_attention(x, read, mixed, layer, after if beside is None else None)
            if not layer.has_mlp:
                continue
            computed = self._mlp(read if beside is None else beside, index, layer, x)
            given = None if inputs is None else inputs[:, index]
            x, read = self._end_layer(x, computed, layer, given, following, streams)
            if packed.virtual is not None and packed.virtual.add_after(self._first_layer + index, x):
                read = self._norm(x, following)
        return self._end_layers(x, embedded, streams)

    def fill(self, packed: PackedBatch, cache: KvCache, hidden: Tensor) -> None:
        """Store the keys and values of the first layer, which has attention, without computing the rest of it.

        Args:
            packed: The rows.
            cache: The KV cache.
            hidden: The layer's input [rows, hidden_size].
        """
        layer, places = self.weights.layers[0], cache_places(packed, cache.tokens_per_block)
        x, rotation = self._norm(hidden, layer.first_norm), self._rotations(packed).get(self._layer_ropes[0])
        if self.config.latent is not None and layer.latent is not None:
            _, keys = self._compress(x, rotation, layer.qkv, layer.latent, self.config.latent)
            cache.write(0, places, keys, keys)
        else:
            self._queries_keys_values(x, rotation, 0, layer, places, cache)

    def _rotations(self, packed: PackedBatch) -> dict[tuple[RopeConfig, int] | None, Any]:
        """Return the rows' rotations by kind of rotary positions, as `LayerOperations.rotation` makes them."""
        tables, positions = self._rope_tables, packed.positions
        if packed.rotations is not None:
            tables = {rope: packed.rotations.of_rows(cos, sin) for rope, (cos, sin) in tables.items()}
            positions = torch.arange(len(positions), device=self._device)
        return {rope: self._operations.rotation(cos, sin, positions) for rope, (cos, sin) in tables.items()}

    def _start_layers(
        self, packed: PackedBatch, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None, ResidualStreams | None]:
        """Return the first layer's input, the rows' token embeddings, and the residual streams.

        The embeddings are None without per-layer embeddings, which are made from them; the streams are None if
        there is only one. `hidden` is the previous stage's output, see `_end_layers`; None at the first stage.
        """
        width, weights = self.config.hidden_size, self.weights
        x = self.embed(packed) if hidden is None else hidden
        if self.config.layer_inputs is None:
            return x, None, None
        embedded = x
        if hidden is not None:
            x, embedded = (part.contiguous() for part in hidden.tensor_split((-width,), dim=1))
        if weights.streams is None:
            return x, embedded, None
        split = weights.streams.split
        given = torch.unflatten(x, 1, (-1, width)) if split is None else split_streams(x, split)
        of_layers = [layer.altup for layer in weights.layers if layer.altup is not None]
        streams = ResidualStreams(self.config, of_layers, given)
        return streams.active, embedded, streams

    def _end_layers(self, x: Tensor, embedded: Tensor | None, streams: ResidualStreams | None) -> Tensor:
        """Return the output of `forward`, given the last layer's output x and the results of `_start_layers`.

        Later stages make the per-layer embeddings of their own layers from `embedded`, and not the first stage for
        all: so each stage has only its layers' columns of the table, a large part of the weights of these models,
        and fewer numbers are sent.
        """
        if streams is not None:
            assert self.weights.streams is not None, "several streams have weights"
            join = self.weights.streams.join
            x = streams.all.flatten(1) if join is None else streams.join(join)
        return x if self.part.is_last_stage or embedded is None else torch.cat((x, embedded), dim=1)

    def _end_attention(
        self, x: Tensor, read: Tensor, mixed: Tensor, layer: LayerWeights, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Add the output of attention, and of the low-rank branch that reads the same input `read`; return sum
        and normed sum."""
        if layer.laurel is None:
            return self._add(x, mixed, layer.attention_post_norm, norm)
        x, _ = self._add(x, mixed, layer.attention_post_norm, None)
        x = (x + add_low_rank(read, layer.laurel, self.config.norm_eps)) * 2**-0.5
        return x, self._norm(x, norm)

    def _end_layer(
        self,
        x: Tensor,
        computed: Tensor,
        layer: LayerWeights,
        given: Tensor | None,
        following: Norm | None,
        streams: ResidualStreams | None,
    ) -> tuple[Tensor, Tensor]:
        """Add the MLP's output and the per-layer embeddings `given`, and scale the sum; return it and its norm."""
        if layer.inputs is None and layer.scale is None:
            return self._add(x, computed, layer.mlp_post_norm, following)
        x, _ = self._add(x, computed, layer.mlp_post_norm, None)
        if layer.inputs is not None and given is not None:
            take = partial(self._take_input, weights=layer.inputs, given=given)
            x = x + take(x) if streams is None else streams.end_layer(x, take)
        x = x if layer.scale is None else x * layer.scale
        return x, self._norm(x, following)

    def forward_to_logits(self, packed: PackedBatch, cache: KvCache, hidden: Tensor | None = None) -> Tensor:
        """Run `forward` and return the `logits` of the sampled rows; at the last stage."""
        return self.logits(self.forward(packed, cache, hidden), packed.sampled_rows)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] float32 of `forward`'s output `hidden` at the indices `rows` [n]
        int64."""
        norm = self.weights.final_norm
        assert norm is not None, "the last stage makes the logits"
        return self._logits_after(norm, hidden[rows])

    def logits_after(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states [n, hidden_size] to logits [n, vocab_size] float32, which applies
        `norm` and the output projection; at the last stage."""
        return partial(self._logits_after, norm)

    def _logits_after(self, norm: Norm, hidden: Tensor) -> Tensor:
        head = self.weights.lm_head
        assert head is not None, "the last stage has the output projection"
        logits = finish_logits(head(self._norm(hidden, norm)).float(), self.config)
        return join_logits(logits, self.config.vocab_size, self.collectives)

    def reserve_adapters(self, num_pages: int, page_rank: int) -> None:
        """Allocate pages for adapters, each for `page_rank` ranks, before the first adapter is loaded.

        At most once.
        """
        self.adapters = AdapterPool(self.config, self.part, num_pages, page_rank, self.dtype, self._device)

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter into its pages, for rows of later batches."""
        self._pool().load(load)

    def _pool(self) -> AdapterPool:
        assert self.adapters is not None, "there are no pages for adapters"
        return self.adapters

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to rows [n, hidden_size] of `forward`'s output; at the last stage."""
        norm = self.weights.final_norm
        assert norm is not None, "the last stage has the final norm"
        return self._norm(hidden, norm)

    def embed(self, packed: PackedBatch) -> Tensor:
        """Return the rows' embeddings [rows, hidden_size], the first layer's input; at the first stage."""
        learned = self.weights.position_embedding
        x = embed_rows(packed, self.config, self._vocabulary, self._look_up, self.collectives, learned)
        return self._norm(x, self.weights.embedding_norm)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        assert self.weights.embedding is not None, "the first stage embeds the tokens"
        return F.embedding(token_ids, self.weights.embedding)

    def _layer_inputs(self, packed: PackedBatch, embedded: Tensor | None) -> Tensor | None:
        """Return the rows' per-layer embeddings, [rows, layers, size]; None for a model without them.

        Virtual tokens are found by their ids, which every stage has; their embeddings come with `embedded`.
        """
        config, weights = self.config.layer_inputs, self.weights.token_inputs
        if config is None or weights is None or embedded is None:
            return None
        num_known = min(config.vocab_size, self.config.vocab_size)
        token_ids = packed.token_ids.masked_fill(packed.token_ids >= num_known, config.virtual_id)
        of_tokens = F.embedding(token_ids, weights.embedding)
        of_tokens = of_tokens * torch.tensor(config.size**0.5, dtype=of_tokens.dtype)
        projected = weights.projection(embedded) * self.config.hidden_size**-0.5
        of_tokens, projected = (
            torch.unflatten(each, 1, (-1, config.size)) for each in (of_tokens, projected)
        )
        return (self._norm(projected, weights.norm) + of_tokens) * 2**-0.5

    def _recur(self, x: Tensor, index: int, layer: LayerWeights, cache: KvCache) -> Tensor | None:
        """Return the output of layer `index`'s recurrent part; None if the layer has none."""
        mixer, factors = self._mixers[index], self.config.multipliers
        if mixer is None:
            return None
        assert cache.states is not None, "a model with recurrent layers has states"
        into, out = layer.recurrent_projections or (layer.qkv, layer.output)
        projected = into(_times(x, factors and factors.recurrent_input))
        if self._section_factors is not None:
            projected = projected * self._section_factors
        mixed = self._row_parallel(out, cache.states.run(self._state_places[index], mixer, projected))
        return _times(mixed, factors and factors.recurrent_output)

    def _take_input(self, x: Tensor, weights: LayerInputWeights, given: Tensor) -> Tensor:
        """Return the per-layer embedding's contribution to the residual stream x; `given` [rows, size] are the
        rows' embeddings for this layer."""
        gated = self._operations.activation(weights.gate(x)) * given
        return self._norm(weights.output(gated), weights.norm)

    def _row_parallel(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply with a weight whose inputs are divided among ranks; the bias is added once, to the sum."""
        if self.collectives.size == 1:
            return linear(x)
        total = self.collectives.all_reduce(replace(linear, bias=None)(x))
        return total if linear.bias is None else total + linear.bias

    def _attend(
        self,
        x: Tensor,
        rotation: Any,
        index: int,
        layer: LayerWeights,
        places: Tensor,
        attend: AttendLayer,
        cache: KvCache,
        own: dict[int, tuple[Tensor, Tensor]],
        query_factors: Tensor | None,
    ) -> Tensor:
        """Return the output of a layer's attention.

        `own` has keys and values of this batch's rows in earlier layers, by a number that counts only layers with
        attention. In layers with a temperature of attention, row i's queries are multiplied by `query_factors[i]`.
        """
        place, gates, factors = self._places[index], None, self.config.multipliers
        x = _times(x, factors and factors.attention_input)
        if self.config.latent is not None and layer.latent is not None:
            queries, keys = self._compress(x, rotation, layer.qkv, layer.latent, self.config.latent)
            values = keys
            cache.write(place, places, keys, values)
        elif self._held.has_own_kv(index):
            queries, keys, values, gates = self._queries_keys_values(x, rotation, index, layer, places, cache)
            if self._held.kv_layers:
                own[place] = keys, values
        else:
            queries = self._queries_alone(x, rotation, index, layer)
            keys, values = cache.tokens(place) if self._held.read_kv else own[place]
        if query_factors is not None and self._held.has_temperature(index):
            queries = (queries * query_factors[:, None, None]).to(queries.dtype)
        read = attend(queries, keys, values, place, sinks=layer.sinks)
        if self.config.latent is not None and layer.latent is not None:
            read = self._decompress(read, layer.latent, self.config.latent)
        if gates is not None:
            read = read * torch.sigmoid(gates)
        if layer.head_gates is not None:
            by_head = torch.unflatten(read, 1, (self._held.num_heads, -1))
            read = (by_head * torch.sigmoid(layer.head_gates(x))[..., None]).flatten(1)
        return _times(self._row_parallel(layer.output, read), factors and factors.attention_output)

    def _queries_keys_values(
        self, x: Tensor, rotation: Any, index: int, layer: LayerWeights, places: Tensor, cache: KvCache
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Store keys and values in the cache; return queries, keys and values, each [rows, heads, head_dim], and
        the attention gates [rows, heads * head_dim], or None without `attention_gate`.
        """
        sizes = self._sizes[index]
        heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
        qkv, gates = layer.qkv(x), None
        if self.config.attention_gate:
            gates, qkv = qkv.split_with_sizes(
                (sizes.query_size, (heads + 2 * kv_heads) * sizes.head_dim), dim=1
            )
        qkv = qkv.view(x.shape[0], -1, sizes.head_dim)
        if not self._held.has_values(index):
            qkv = torch.cat((qkv, qkv[:, heads:]), dim=1)
        norms = None
        if self._plain_norm is not None and rotation is not None:
            norms = self._plain_norm, self._plain_norm
        elif layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
            if self.config.qk_norm != "heads":
                queries, keys, values = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
                queries = self._norm_together(queries, layer.query_norm, self.config.num_heads)
                keys = self._norm_together(keys, layer.key_norm, self.config.num_kv_heads)
                qkv, norms = torch.cat((queries, keys, values), dim=1), None
        return *self._operations.heads(qkv, norms, rotation, places, self._places[index], cache), gates

    def _queries_alone(self, x: Tensor, rotation: Any, index: int, layer: LayerWeights) -> Tensor:
        """Return the queries [rows, heads, head_dim] of a layer that reads another layer's keys and values."""
        queries = torch.unflatten(layer.qkv(x), 1, (-1, self._sizes[index].head_dim))
        if layer.query_norm is not None:
            queries = self._norm(queries, layer.query_norm)
        return queries if rotation is None else rotate(queries, *rotation)

    def _compress(
        self,
        x: Tensor,
        rotation: Any,
        down: Linear,
        weights: LatentWeights,
        config: LatentAttention,
    ) -> tuple[Tensor, Tensor]:
        """Return the queries of latent attention, and the latent keys and values that it caches.

        Returns:
            Queries multiplied by their heads' key projections [rows, heads, cached_dim]; and latent and shared key
            concatenated, which are key and value of the only key head [rows, 1, cached_dim].
        """
        rank, heads = config.kv_rank, self._held.num_heads
        query_width = config.query_rank or heads * config.query_head_dim
        queries, latent, shared_key = down(x).split_with_sizes(
            (query_width, rank, config.rope_head_dim), dim=1
        )
        if weights.query_up is not None and weights.query_norm is not None:
            queries = weights.query_up(apply_norm(queries, weights.query_norm, config.norm_eps))
        queries = torch.unflatten(queries, 1, (heads, config.query_head_dim))
        plain, turned = queries.split_with_sizes((config.nope_head_dim, config.rope_head_dim), dim=2)
        turned = torch.cat([turned, shared_key[:, None]], dim=1)
        if config.interleaved:
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
        if rotation is not None:
            turned = rotate(turned, *rotation)
        key_up, _ = self._by_head(weights, config)
        absorbed = (plain.transpose(0, 1) @ key_up).transpose(0, 1)
        latent = apply_norm(latent, weights.kv_norm, config.norm_eps)
        keys = torch.cat([latent[:, None], turned[:, heads:]], dim=2)
        return torch.cat([absorbed, turned[:, :heads]], dim=2), keys

    def _decompress(self, read: Tensor, weights: LatentWeights, config: LatentAttention) -> Tensor:
        """Return the heads' values [rows, heads * value_head_dim] from their attention output [rows, heads *
        cached_dim].

        The part of the output that belongs to the shared keys is not used.
        """
        _, value_up = self._by_head(weights, config)
        read = torch.unflatten(read, 1, (self._held.num_heads, config.cached_dim))[..., : config.kv_rank]
        return (read.transpose(0, 1) @ value_up.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _by_head(self, weights: LatentWeights, config: LatentAttention) -> tuple[Tensor, Tensor]:
        """Return each head's projections of the latent, to keys [heads, nope_head_dim, kv_rank] and to values
        [heads, value_head_dim, kv_rank]."""
        widths = config.nope_head_dim, config.value_head_dim
        by_head = torch.unflatten(weights.kv_up.weight, 0, (self._held.num_heads, -1))
        keys, values = by_head.split_with_sizes(widths, dim=1)
        return keys, values

    def _mlp(self, x: Tensor, index: int, layer: LayerWeights, stream: Tensor) -> Tensor:
        """Compute layer `index`'s MLP or experts for x [rows, hidden_size], the residual stream `stream` after the
        norm."""
        if layer.experts is not None:
            if layer.experts.norms is not None:
                return self._mix_beside(x, layer, layer.experts, layer.experts.norms, stream)
            return self._mix(x, layer, layer.experts)
        assert layer.up is not None and layer.down is not None, "a layer has experts or an MLP"
        inner, factors = layer.up(x), self.config.multipliers
        if factors is not None and factors.mlp_gate != 1:
            inner.chunk(2, dim=-1)[0].mul_(factors.mlp_gate)
        if self._held.gate_sparsity and self._held.gate_sparsity[index]:
            drop_small_gates(inner.chunk(2, dim=-1)[0], self._held.gate_sparsity[index], self.collectives)
        computed = self._row_parallel(layer.down, self._operations.activate(inner, layer.activation))
        return _times(computed, factors and factors.mlp_output)

    def _mix(self, x: Tensor, layer: LayerWeights, experts: ExpertWeights[Linear]) -> Tensor:
        """Compute a layer's experts and shared MLP; the results of all ranks, each of which has a part, are
        summed."""
        config = self._held.experts
        assert config is not None, "the layer has experts"
        if experts.latent is None:
            given = mix_experts(x, experts, config, self._operations.activate)
        else:
            read, write = experts.latent
            given = write(mix_experts(read(x), experts, config, self._operations.activate, x))
        if layer.up is not None and layer.down is not None:
            shared = layer.down(self._operations.activate(layer.up(x)))
            if experts.shared_gate is not None:
                shared = torch.sigmoid(experts.shared_gate(x)) * shared
            given = given + shared
        return self.collectives.all_reduce(given) if self.collectives.size > 1 else given

    def _mix_beside(
        self,
        x: Tensor,
        layer: LayerWeights,
        experts: ExpertWeights[Linear],
        norms: ExpertNorms,
        stream: Tensor,
    ) -> Tensor:
        """Compute the sum of a layer's MLP, which reads x, and its experts, which read `stream` through other
        norms."""
        config = self._held.experts
        assert config is not None and layer.up is not None and layer.down is not None, "the layer has both"
        shared = self._row_parallel(layer.down, self._operations.activate(layer.up(x)))
        routed = self._norm(stream, norms.router) * self.config.hidden_size**-0.5
        read = self._norm(stream, norms.before)
        given = mix_experts(read, experts, config, self._operations.activate, routed)
        if self.collectives.size > 1:
            given = self.collectives.all_reduce(given)
        return self._norm(shared, norms.shared_after) + self._norm(given, norms.after)

    def _add(
        self, x: Tensor, computed: Tensor, post_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Add the output of attention or MLP, after `post_norm`, to the residual stream; return sum and normed
        sum."""
        return self._operations.add_norm(x, self._norm(computed, post_norm), norm)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else apply_norm(x, norm, self.config.norm_eps)

    def _norm_together(self, x: Tensor, norm: Norm, num_heads: int) -> Tensor:
        """Apply RMSNorm over all `num_heads` heads of the model; this rank has x [rows, heads, head_dim].

        If there are fewer heads than ranks, several ranks have the same head, which is counted once.
        """
        if self.collectives.size == 1:
            return self._norm(x.flatten(1), norm).view_as(x)
        wide = x.float()
        squares = self.collectives.all_reduce(wide.square().sum((1, 2)))
        copies = max(1, self.collectives.size // num_heads)
        mean = squares / (copies * num_heads * self.config.head_dim)
        scale = torch.rsqrt(mean + self.config.norm_eps)
        return (wide * scale[:, None, None]).to(x.dtype) * norm.weight.view(x.shape[1:])


def _can_have_fixed_shapes(config: DecoderConfig) -> bool:
    # finding the experts that have rows waits for the device
    return config.experts is None and config.recurrent is None and not config.drafts


def _places(held: DecoderConfig) -> list[int]:
    """Return each layer's index among the layers with keys and values of their own; a layer that reads another
    layer's keys and values gets the other layer's index."""
    if held.read_kv:
        return list(held.read_kv)
    places: list[int] = []
    count = 0
    for layer in range(held.num_layers):
        if held.has_attention(layer) and not held.has_own_kv(layer):
            places.append(places[held.kv_layers[layer]])
            continue
        places.append(count)
        count += held.has_attention(layer)
    return places


def _state_places(held: DecoderConfig) -> list[int]:
    """Return each layer's index among the layers with a recurrent state."""
    return list(accumulate(map(held.has_state, range(held.num_layers)), initial=0))[:-1]


def _times(x: Tensor, factor: float | None) -> Tensor:
    """Return x times `factor`; None stands for 1."""
    return x if factor in (None, 1.0) else x * factor


def finish_logits(logits: Tensor, config: DecoderConfig) -> Tensor:
    """Apply the model's logit scale and cap to the output projection's logits [rows, ids] float32."""
    if config.logits_scale != 1:
        logits = logits * config.logits_scale
    if config.logits_soft_cap is not None:
        logits = torch.tanh(logits / config.logits_soft_cap) * config.logits_soft_cap
    return logits
