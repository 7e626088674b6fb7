"""Finds where the checkpoint has each tensor of a rank's part, from the model's description alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain

import torch

from inflight.models.decoder_config import (
    AltUpConfig,
    DecoderConfig,
    ExpertsConfig,
    LatentAttention,
    LayerInputsConfig,
)
from inflight.models.families.family import ExpertNames, LatentNames, MlpNames
from inflight.models.recurrent import KimiDelta, total_size
from inflight.models.registry import ModelDescription
from inflight.models.rope_config import RopeConfig
from inflight.models.sharding import Part, Range
from inflight.models.weight_sources import (
    AltUpSources,
    DecoderSources,
    DraftHeadSources,
    ExpertNormSources,
    ExpertSources,
    LatentSources,
    LaurelSources,
    LayerInputSources,
    LayerSources,
    LinearSource,
    NormSource,
    RecurrentSources,
    Rows,
    StackSource,
    StoredRows,
    StreamSources,
    TensorSource,
    TokenInputSources,
    XieluSources,
)


def find_sources(model: ModelDescription, part: Part | None = None) -> DecoderSources:
    """Return the sources of a part of the model; with `part` None, of the whole model."""
    return _Finder(model, part or Part.whole(model.decoder)).decoder()


def draft_layer_of(model: ModelDescription) -> ModelDescription:
    """Return a model with a draft head as if the head's layer were its only layer."""
    names = model.names
    assert names.draft_head is not None, "a family with a draft head names its modules"
    layer = draft_head_prefix(model) + names.draft_head.layer
    return replace(
        model, decoder=model.decoder.draft_layer, names=replace(names, base="", layers=layer, draft_head=None)
    )


def draft_head_prefix(model: ModelDescription) -> str:
    """Return the prefix of all tensors of a model's draft head."""
    names = model.names
    assert names.draft_head is not None, "a family with a draft head names its modules"
    return names.draft_head.prefix or names.base + names.layers.format(model.decoder.num_layers)


class _Finder:
    """Finds the sources of a part of a model, from the model's description and the rank's shard."""

    def __init__(self, model: ModelDescription, part: Part) -> None:
        self._model, self._decoder, self._names, self._part = model, model.decoder, model.names, part

    def decoder(self) -> DecoderSources:
        decoder, names, part = self._decoder, self._names, self._part
        vocabulary = part.shard.split(decoder.vocab_size)
        embedding = position_embedding = embedding_norm = lm_head = final_norm = None
        if part.is_first_stage or (part.is_last_stage and decoder.drafts):
            embedding = self._table(names.base + names.embedding, decoder.vocab_size, vocabulary)
            if decoder.learned_positions:
                positions = decoder.max_positions + decoder.position_offset
                name = names.base + names.position_embedding
                position_embedding = self._table(name, positions, (0, positions))
            if decoder.embedding_norm:
                embedding_norm = self._norm(names.base + names.embedding_norm, decoder.hidden_size)
        if part.is_last_stage:
            if not (decoder.tied_embeddings and embedding is not None):
                name = names.base + names.embedding if decoder.tied_embeddings else names.lm_head
                lm_head = self._table(name, decoder.vocab_size, vocabulary)
            final_norm = self._norm(names.base + names.final_norm, decoder.hidden_size)
        token_inputs = None if decoder.layer_inputs is None else self._token_inputs(decoder.layer_inputs)
        streams = None if decoder.altup is None else self._streams(decoder.altup)
        layers = tuple(self._layer(index) for index in range(*part.layers))
        return DecoderSources(
            embedding,
            position_embedding,
            embedding_norm,
            lm_head,
            final_norm,
            token_inputs,
            streams,
            layers,
            self._draft_head() if decoder.has_draft_head and part.is_last_stage else None,
        )

    def _draft_head(self) -> DraftHeadSources:
        names, hidden = self._names.draft_head, self._decoder.hidden_size
        assert names is not None, "a family with a draft head names its modules"
        prefix, part = draft_head_prefix(self._model), Part(self._part.shard, (0, 1), False, False)
        return DraftHeadSources(
            embedding_norm=self._norm(prefix + names.embedding_norm, hidden),
            hidden_norm=self._norm(prefix + names.hidden_norm, hidden),
            projection=self._replicated(prefix + names.projection, hidden, 2 * hidden),
            layer=find_sources(draft_layer_of(self._model), part).layers[0],
            final_norm=self._norm(prefix + names.final_norm, hidden),
        )

    def _table(self, name: str, rows: int, own: Range) -> TensorSource:
        hidden = self._decoder.hidden_size
        return TensorSource((StoredRows(f"{name}.weight", rows, (own,)),), hidden, (0, hidden))

    def _token_inputs(self, config: LayerInputsConfig) -> TokenInputSources:
        """Return the source of the weights that make per-layer embeddings; every rank of a stage has the weights
        for all of the stage's layers."""
        decoder, base, names = self._decoder, self._names.base, self._names.layer_inputs
        assert names is not None, "a family with per-layer embeddings names their modules"
        width, hidden = decoder.num_layers * config.size, decoder.hidden_size
        begin, end = self._part.layers
        own = begin * config.size, end * config.size
        rows = (_whole(f"{base}{names.embedding}.weight", config.vocab_size),)
        projection = (StoredRows(base + names.projection, width, (own,)),)
        return TokenInputSources(
            embedding=TensorSource(rows, width, own),
            projection=self._linear(projection, hidden, (0, hidden), False),
            norm=self._norm(base + names.norm, config.size),
        )

    def _streams(self, config: AltUpConfig) -> StreamSources:
        """Return the sources of the projections that make several residual streams and join them."""
        hidden, base, names = self._decoder.hidden_size, self._names.base, self._names.altup
        assert names is not None, "a family with several residual streams names their modules"

        def stacked(name: str) -> LinearSource:
            others = range(config.num_streams - 1)
            modules = tuple(_whole(base + name.format(index), hidden) for index in others)
            return self._linear(modules, hidden, (0, hidden), False)

        return StreamSources(
            split=stacked(names.split) if self._part.is_first_stage else None,
            join=stacked(names.join) if self._part.is_last_stage else None,
        )

    def _altup(self, prefix: str, config: AltUpConfig) -> AltUpSources:
        hidden, count, names = self._decoder.hidden_size, config.num_streams, self._names.altup
        assert names is not None, "a family with several residual streams names their modules"
        return AltUpSources(
            router=self._replicated(prefix + names.router, count, hidden),
            router_norm=self._norm(prefix + names.router_norm, hidden),
            prediction=self._replicated(prefix + names.prediction, count * count, count),
            correction=self._replicated(prefix + names.correction, count, count),
            output_scale=_vector(prefix + names.output_scale, hidden),
        )

    def _laurel(self, prefix: str, rank: int) -> LaurelSources:
        hidden, names = self._decoder.hidden_size, self._names.laurel
        assert names is not None, "a family with low-rank branches names their modules"
        return LaurelSources(
            down=self._replicated(prefix + names.down, rank, hidden),
            up=self._replicated(prefix + names.up, hidden, rank),
            norm=self._norm(prefix + names.norm, hidden),
        )

    def _layer_inputs(self, prefix: str, config: LayerInputsConfig) -> LayerInputSources:
        hidden, size, names = self._decoder.hidden_size, config.size, self._names.layer_inputs
        assert names is not None, "a family with per-layer embeddings names their modules"
        return LayerInputSources(
            gate=self._replicated(prefix + names.gate, size, hidden),
            output=self._replicated(prefix + names.output, hidden, size),
            norm=self._norm(prefix + names.output_norm, hidden),
        )

    def _layer(self, index: int) -> LayerSources:
        decoder, names, shard = self._decoder.at(index), self._names, self._part.shard
        attention, is_recurrent = names.attention, decoder.is_recurrent(index)
        norms = names.recurrent_norms if is_recurrent and names.recurrent_norms else names.norms
        prefix = names.base + names.layers.format(index)

        def norm(module: str) -> NormSource | None:
            return self._norm(prefix + module, decoder.hidden_size) if module else None

        queries, keys = (
            (decoder.query_size, shard.query_rows(decoder)),
            (decoder.kv_size, shard.kv_rows(decoder)),
        )
        has_attention, has_state = decoder.has_attention(index), decoder.has_state(index)
        qkv, latent, output = None, None, None
        if has_attention or has_state:
            qkv, latent = self._attention_input(decoder, index, prefix)
            output = (
                self._recurrent_output(prefix) if is_recurrent else self._attention_output(decoder, prefix)
            )
        experts, up, down = None, None, None
        if decoder.experts is not None and decoder.has_experts(index):
            assert names.experts is not None, "a family with experts names their modules"
            width = decoder.experts.shared_intermediate_size
            up, down = self._mlp(prefix, names.experts.shared, width, is_summed=True)
            experts = self._experts(prefix, names.experts, decoder.experts)
        elif decoder.has_mlp(index):
            up, down = self._mlp(prefix, names.mlp, decoder.intermediate_size)
        return LayerSources(
            qkv=qkv,
            latent=latent,
            up=up,
            down=down,
            experts=experts,
            attention_norm=None if qkv is None else norm(norms.attention),
            query_norm=self._head_norm(decoder, prefix + attention.query_norm, queries)
            if has_attention
            else None,
            key_norm=self._head_norm(decoder, prefix + attention.key_norm, keys)
            if has_attention and decoder.has_own_kv(index)
            else None,
            output=output,
            attention_post_norm=None if qkv is None else norm(norms.attention_post),
            mlp_norm=norm(norms.mlp) if decoder.has_mlp(index) else None,
            mlp_post_norm=norm(norms.mlp_post) if decoder.has_mlp(index) else None,
            sinks=self._sinks(prefix) if decoder.learned_sinks and has_attention else None,
            head_gates=self._head_gates(prefix) if decoder.head_gates and has_attention else None,
            recurrent=self._recurrent(prefix) if has_state else None,
            recurrent_projections=(self._recurrent_product(prefix), self._recurrent_output(prefix))
            if has_state and has_attention
            else None,
            inputs=None if decoder.layer_inputs is None else self._layer_inputs(prefix, decoder.layer_inputs),
            activation=self._xielu(prefix) if decoder.activation == "xielu" else None,
            scale=_vector(prefix + names.layer_scale, 1) if decoder.layer_scales else None,
            altup=None if decoder.altup is None else self._altup(prefix, decoder.altup),
            laurel=self._laurel(prefix, decoder.laurel_rank) if decoder.laurel_rank else None,
        )

    def _attention_input(
        self, decoder: DecoderConfig, index: int, prefix: str
    ) -> tuple[LinearSource, LatentSources | None]:
        """Return the input projection of attention, or of a recurrent layer, and the weights of latent attention.

        `decoder` has the sizes of layer `index`.
        """
        names, shard = self._names, self._part.shard
        modules = names.attention.qkv
        if decoder.is_recurrent(index):
            return self._recurrent_product(prefix), None
        if decoder.latent is not None:
            assert names.attention.latent is not None, "a family with latent attention names its modules"
            return self._latent(prefix, names.attention.latent, decoder.latent)
        if decoder.attention_gate:
            return self._gated_qkv(prefix, modules), None
        keys = decoder.kv_size, shard.kv_rows(decoder)
        rows = (decoder.query_size, shard.query_rows(decoder)), keys, keys
        kinds = 1 if not decoder.has_own_kv(index) else 3 if decoder.has_values(index) else 2
        modules = modules if len(modules) == 1 else modules[:kinds]
        qkv = self._column_parallel(prefix, modules, rows[:kinds], decoder.qkv_bias)
        rope = decoder.ropes[index]
        return (qkv if rope is None or not rope.interleaved else self._in_halves(qkv, rope)), None

    def _attention_output(self, decoder: DecoderConfig, prefix: str) -> LinearSource:
        """Return the output projection of a layer; `decoder` has the layer's sizes."""
        own = self._part.shard.head_rows(decoder, decoder.output_head_dim)
        columns = decoder.num_heads * decoder.output_head_dim
        return self._row_parallel(prefix + self._names.attention.output, columns, own, decoder.output_bias)

    def _in_halves(self, qkv: LinearSource, rope: RopeConfig) -> LinearSource:
        """Reorder the rows of queries and keys as the rotation expects them. The rows of values stay in place."""
        has_weights = self._decoder.qk_norm not in (None, "unweighted")
        assert not has_weights, "the weights of norms are not reordered"
        size, of_head = self._decoder.head_dim, rope.rows_in_halves(self._decoder.head_dim)

        def reordered(source: TensorSource) -> TensorSource:
            number, parts = 0, list[StoredRows]()
            for part in source.parts:
                ranges = list[Rows]()
                for rows in part.ranges:
                    is_rotated, number = number < 2, number + 1  # queries, then keys, then values
                    heads = range(rows[0], rows[1], size)
                    halves = [(head + a, head + b, step) for head in heads for a, b, step in of_head]
                    ranges += halves if is_rotated else [rows]
                parts.append(replace(part, ranges=tuple(ranges)))
            return replace(source, parts=tuple(parts))

        return replace(qkv, weight=reordered(qkv.weight), bias=qkv.bias and reordered(qkv.bias))

    def _gated_qkv(self, prefix: str, modules: tuple[str, ...]) -> LinearSource:
        """Return gates, queries, keys and values; in the checkpoint, each head's query is followed by its gate."""
        decoder, shard = self._decoder, self._part.shard
        size, (first, last) = decoder.head_dim, shard.split(decoder.num_heads)
        queries, gates = (
            tuple(((2 * head + kind) * size, (2 * head + kind + 1) * size) for head in range(first, last))
            for kind in range(2)
        )
        query, key, value = (prefix + module for module in modules)
        own_keys = (shard.kv_rows(decoder),)
        parts = (
            StoredRows(query, 2 * decoder.query_size, (*gates, *queries)),
            StoredRows(key, decoder.kv_size, own_keys),
            StoredRows(value, decoder.kv_size, own_keys),
        )
        return self._linear(parts, decoder.hidden_size, (0, decoder.hidden_size), decoder.qkv_bias)

    # ------------------------------------------------------------------ recurrent layers

    def _recurrent_product(self, prefix: str) -> LinearSource:
        """Return this shard's rows of a recurrent layer's input projection."""
        names, config = self._names.recurrent, self._decoder.recurrent
        assert names is not None and config is not None, "the layer is recurrent"
        decoder, parts = self._decoder, list[StoredRows]()
        for index, (module, _) in enumerate(names.product):
            rows = total_size(decoder.recurrent_sections(index))
            parts.append(StoredRows(prefix + module, rows, self._part.shard.recurrent_rows(decoder, index)))
        hidden = decoder.hidden_size
        return self._linear(tuple(parts), hidden, (0, hidden), config.has_bias)

    def _recurrent_output(self, prefix: str) -> LinearSource:
        names, config = self._names.recurrent, self._decoder.recurrent
        assert names is not None and config is not None, "the layer is recurrent"
        own = self._part.shard.split(config.output_width)
        return self._row_parallel(prefix + names.output, config.output_width, own, config.has_bias)

    def _recurrent(self, prefix: str) -> RecurrentSources:
        """Return the weights of a recurrent layer other than its projections, in float32 except for the norm."""
        names, config = self._names.recurrent, self._decoder.recurrent
        assert names is not None and config is not None, "the layer is recurrent"
        sections = config.conv_sections
        of_modules = [sections] if len(names.conv) == 1 else [(each,) for each in sections]
        conv = tuple(
            StoredRows(prefix + module, total_size(own), self._part.shard.section_rows(own))
            for module, own in zip(names.conv, of_modules, strict=True)
        )

        is_kimi, heads = isinstance(config, KimiDelta), self._part.shard.split(config.num_heads)

        def of_heads(name: str, width: int = 1) -> TensorSource | None:
            own = StoredRows(prefix + name, config.num_heads * width, (_scaled(heads, width),))
            is_spread = is_kimi and width == 1
            stored_as = (1, 1, config.num_heads, 1) if is_spread else None
            return TensorSource((own,), dtype=torch.float32, stored_as=stored_as) if name else None

        def from_head(name: str) -> TensorSource | None:
            if not isinstance(config, KimiDelta):
                return None
            rows = StoredRows(
                f"{prefix}{name}.weight", config.output_width, (_scaled(heads, config.head_dim),)
            )
            return TensorSource((rows,), config.head_dim, (0, config.head_dim))

        normed = config.norm_sections
        norm = StoredRows(
            f"{prefix}{names.norm}.weight", total_size(normed), self._part.shard.section_rows(normed)
        )
        return RecurrentSources(
            conv=TensorSource(
                _named(conv, "weight"),
                config.conv_width,
                (0, config.conv_width),
                is_conv=True,
                dtype=torch.float32,
            ),
            conv_bias=TensorSource(_named(conv, "bias"), dtype=torch.float32)
            if config.has_conv_bias
            else None,
            decay=of_heads(names.decay),
            step_bias=of_heads(names.step_bias, config.head_dim if isinstance(config, KimiDelta) else 1),
            skip=of_heads(names.skip),
            norm=TensorSource((norm,)) if names.norm and normed else None,
            step_up=from_head(names.step_up),
            gate_up=from_head(names.gate_up),
        )

    def _latent(
        self, prefix: str, names: LatentNames, config: LatentAttention
    ) -> tuple[LinearSource, LatentSources]:
        """Return the projection of hidden states and the other latent attention weights of this shard's heads."""
        decoder, rank = self._decoder, config.query_rank

        def rows_of_heads(width: int) -> tuple[int, Range]:
            return decoder.num_heads * width, self._part.shard.head_rows(decoder, width)

        def of_heads(name: str, width: int, columns: int) -> LinearSource:
            count, own = rows_of_heads(width)
            weight = StoredRows(f"{prefix}{name}.weight", count, (own,))
            return LinearSource(TensorSource((weight,), columns, (0, columns), self._names.transposed), None)

        queries = rows_of_heads(config.query_head_dim) if rank is None else (rank, (0, rank))
        modules = (names.query if rank is None else names.query_down, names.kv_down)
        rows = queries, (config.cached_dim, (0, config.cached_dim))
        return self._column_parallel(prefix, modules, rows, decoder.qkv_bias), LatentSources(
            query_norm=None if rank is None else self._norm(prefix + names.query_down_norm, rank),
            query_up=None if rank is None else of_heads(names.query_up, config.query_head_dim, rank),
            kv_norm=self._norm(prefix + names.kv_down_norm, config.kv_rank),
            kv_up=of_heads(names.kv_up, config.nope_head_dim + config.value_head_dim, config.kv_rank),
        )

    def _mlp(
        self, prefix: str, names: MlpNames | None, inner: int, is_summed: bool = False
    ) -> tuple[LinearSource, LinearSource] | tuple[None, None]:
        """Return both projections of an MLP of inner width `inner`; (None, None) if the width is 0, without an
        MLP.

        With `is_summed`, ranks sum up results that include the last bias, so only the first rank has this bias.
        """
        if not inner or names is None:
            return None, None
        decoder, own = self._decoder, (inner, self._part.shard.split(inner))
        rows = (own, own) if decoder.gated_mlp else (own,)
        has_down_bias = decoder.mlp_bias and (not is_summed or own[1][0] == 0)
        return (
            self._column_parallel(prefix, names.up, rows, decoder.mlp_bias, decoder.gated_mlp),
            self._row_parallel(prefix + names.down, inner, own[1], has_down_bias),
        )

    def _xielu(self, prefix: str) -> XieluSources:
        """Return the parameters of a layer's xIELU, which every rank has."""
        learned, constants = (
            tuple(_whole(prefix + self._names.activation + name, 1) for name in names)
            for names in (("alpha_p", "alpha_n"), ("beta", "eps"))
        )
        return XieluSources(TensorSource(learned), TensorSource(constants, stored_as=()))

    def _head_gates(self, prefix: str) -> LinearSource:
        """Return the projection to the gates of this shard's query heads."""
        hidden, count = self._decoder.hidden_size, self._decoder.num_heads
        rows = StoredRows(prefix + self._names.attention.head_gates, count, (self._part.shard.split(count),))
        return self._linear((rows,), hidden, (0, hidden), False)

    def _sinks(self, prefix: str) -> TensorSource:
        """Return the learned scores of this shard's query heads."""
        count = self._decoder.num_heads
        name = prefix + self._names.attention.sinks
        return TensorSource((StoredRows(name, count, (self._part.shard.split(count),)),))

    def _experts(self, prefix: str, names: ExpertNames, config: ExpertsConfig) -> ExpertSources:
        """Return a layer's router, and this shard's part of its experts."""
        hidden, inner = self._decoder.hidden_size, config.intermediate_size
        outer = config.latent_size or hidden
        own = self._part.shard.slice_of_experts(inner)
        held = range(*self._part.shard.experts(config.count))
        modules = [prefix + names.prefix.format(index) for index in held]
        up = [tuple(StoredRows(each + name, inner, (own,)) for name in names.each.up) for each in modules]
        down = [(_whole(each + names.each.down, outer),) for each in modules]

        def replicated(name: str, rows: int, bias: bool = False) -> LinearSource:
            module = (_whole(prefix + name, rows),)
            weight = TensorSource(_named(module, "weight"), hidden, (0, hidden), self._names.transposed)
            return LinearSource(weight, TensorSource(_named(module, "bias")) if bias else None)

        def stack(
            modules: list[tuple[StoredRows, ...]], columns: int, kept: Range, has_bias: bool, is_gated: bool
        ) -> StackSource:
            matrices = tuple(TensorSource(_named(each, "weight"), columns, kept) for each in modules)
            bias = None
            if has_bias:
                bias = TensorSource(tuple(chain.from_iterable(_named(each, "bias") for each in modules)))
            return StackSource(bias, matrices, is_gated)

        # The ranks' results are summed, so only one rank may add the bias.
        has_down_bias = config.has_bias and own[0] == 0
        # Kept in float32: probabilities to which it is added may differ by less than bfloat16 can represent.
        whole = config.count if names.has_choice_bias_row else None
        num_rows = 1 if names.has_choice_bias_row else config.count
        choice_bias = TensorSource(
            (_whole(prefix + names.choice_bias, num_rows),),
            whole,
            (0, config.count),
            dtype=torch.float32,
        )
        return ExpertSources(
            router=replicated(names.router, config.count, config.has_router_bias),
            up=stack(up, outer, (0, outer), config.has_bias, is_gated=self._decoder.gated_mlp),
            down=stack(down, inner, own, has_down_bias, is_gated=False),
            shared_gate=replicated(names.shared_gate, 1) if config.has_shared_gate else None,
            choice_bias=choice_bias if config.has_choice_bias else None,
            norms=self._expert_norms(prefix, names) if config.has_norms else None,
            scales=_vector(prefix + names.scales, config.count) if config.has_expert_scales else None,
            latent=self._expert_latent(prefix, names, outer) if config.latent_size else None,
        )

    def _expert_latent(self, prefix: str, names: ExpertNames, size: int) -> tuple[LinearSource, LinearSource]:
        """Return the projections of hidden states to the experts' inputs, and of their outputs to hidden
        states, whole.

        Ranks sum up results that include the second projection's bias, so only the first rank has this bias.
        """
        hidden, bias = self._decoder.hidden_size, self._decoder.mlp_bias
        down, up = (prefix + name for name in names.latent)
        return (
            self._linear((_whole(down, size),), hidden, (0, hidden), bias),
            self._linear((_whole(up, hidden),), size, (0, size), bias and self._part.shard.rank == 0),
        )

    def _expert_norms(self, prefix: str, names: ExpertNames) -> ExpertNormSources:
        hidden, norms = self._decoder.hidden_size, names.norms
        assert norms is not None, "a family with norms of experts names them"
        return ExpertNormSources(
            router=NormSource(_vector(prefix + norms.router, hidden), None, self._decoder.norm_offset),
            before=self._norm(prefix + norms.before, hidden),
            after=self._norm(prefix + norms.after, hidden),
            shared_after=self._norm(prefix + norms.shared_after, hidden),
        )

    def _head_norm(
        self, decoder: DecoderConfig, module: str, all_heads: tuple[int, Range]
    ) -> NormSource | None:
        """Return this shard's part of a layer's norm over each head, or over all heads together; `decoder` has the
        layer's sizes."""
        if decoder.qk_norm in (None, "unweighted"):
            return None
        size, own = (decoder.head_dim, None) if decoder.qk_norm == "heads" else all_heads
        return self._norm(module, size, own)

    def _column_parallel(
        self,
        prefix: str,
        modules: tuple[str, ...],
        rows: tuple[tuple[int, Range], ...],
        bias: bool,
        is_gated: bool = False,
    ) -> LinearSource:
        """Return fused column-parallel projections; `rows`: each one's number of rows and this shard's range of
        them."""
        fused, *others = modules
        if self._names.attention.qkv_by_head and len(rows) == 3 and not others:
            parts = (self._rows_by_head(prefix + fused),)
        elif others:
            pairs = zip(modules, rows, strict=True)
            parts = tuple(StoredRows(prefix + module, count, (own,)) for module, (count, own) in pairs)
        else:
            starts = accumulate((count for count, _ in rows), initial=0)
            own = tuple((start + begin, start + end) for start, (_, (begin, end)) in zip(starts, rows))
            parts = (StoredRows(prefix + fused, sum(count for count, _ in rows), own),)
        hidden = self._decoder.hidden_size
        return self._linear(parts, hidden, (0, hidden), bias, is_gated)

    def _rows_by_head(self, name: str) -> StoredRows:
        """Return this shard's rows of a matrix ordered by key head, reordered to all queries, all keys, all
        values."""
        decoder, shard = self._decoder, self._part.shard
        group = decoder.num_heads // decoder.num_kv_heads
        keys = range(*shard.share(decoder.num_kv_heads))
        heads = [
            *(head // group * (group + 2) + head % group for head in range(*shard.split(decoder.num_heads))),
            *(key * (group + 2) + group for key in keys),
            *(key * (group + 2) + group + 1 for key in keys),
        ]
        ranges = (_scaled((head, head + 1), decoder.head_dim) for head in heads)
        return StoredRows(name, decoder.query_size + 2 * decoder.kv_size, tuple(ranges))

    def _row_parallel(self, module: str, columns: int, own: Range, bias: bool) -> LinearSource:
        hidden = self._decoder.hidden_size
        return self._linear((_whole(module, hidden),), columns, own, bias)

    def _replicated(self, module: str, rows: int, columns: int) -> LinearSource:
        """Return a matrix without biases, of which every rank has all rows and columns."""
        return self._linear((_whole(module, rows),), columns, (0, columns), False)

    def _linear(
        self, modules: tuple[StoredRows, ...], columns: int, kept: Range, bias: bool, is_gated: bool = False
    ) -> LinearSource:
        weight = TensorSource(_named(modules, "weight"), columns, kept, self._names.transposed)
        return LinearSource(weight, TensorSource(_named(modules, "bias")) if bias else None, is_gated)

    def _norm(self, module: str, size: int, own: Range | None = None) -> NormSource:
        rows = (StoredRows(module, size, (own or (0, size),)),)
        decoder, is_layer_norm = self._decoder, self._decoder.norm == "layer"
        bias = TensorSource(_named(rows, "bias")) if is_layer_norm and decoder.norm_bias else None
        weight = TensorSource(_named(rows, "weight"))
        return NormSource(weight, bias, decoder.norm_offset, is_layer_norm and not decoder.norm_bias)


def _named(modules: tuple[StoredRows, ...], kind: str) -> tuple[StoredRows, ...]:
    """Return the weights or biases of modules."""
    return tuple(replace(each, name=f"{each.name}.{kind}") for each in modules)


def _scaled(part: Range, width: int) -> Range:
    """Return the range of rows of a range of heads, each of which has `width` rows."""
    return part[0] * width, part[1] * width


def _whole(name: str, rows: int) -> StoredRows:
    """Return all rows of a tensor."""
    return StoredRows(name, rows, ((0, rows),))


def _vector(name: str, size: int) -> TensorSource:
    """Return the source of a vector of which the rank has all elements."""
    return TensorSource((_whole(name, size),))
