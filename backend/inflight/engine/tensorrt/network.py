"""A decoder as two networks: the layers, from token ids to hidden states, and the head, from these to logits.

The networks compute what `engine/layers/decoder.py` computes, operation by operation; differences between families
are in the DecoderConfig. Inputs and outputs have rows in the order of the batch; in between rows are in the
order of their slots, in which caches are written.
"""

from __future__ import annotations

from typing import Any

from inflight.additional_outputs import OutputKind, meaning_of
from inflight.engine.components import only_by_torch
from inflight.engine.tensorrt.attention import NetworkAttention, PackedAttention, SplitAttention
from inflight.engine.tensorrt.components import Components
from inflight.engine.tensorrt.graph import Graph
from inflight.engine.tensorrt.lora import NetworkAdapters
from inflight.engine.tensorrt.sidecar import Settings
from inflight.engine.tensorrt.weights import NetworkMatrix, Weights
from inflight.engine.windows import layer_windows
from inflight.errors import ConfigError
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import Layer, Norm
from inflight.models.rope_config import RopeConfig
from inflight.models.rope_tables import query_factors, rope_tables
from inflight.models.sharding import Part


def lacking(config: DecoderConfig) -> tuple[str, ...]:
    """Return the components of a model that TensorRT's layers cannot express, or only by copying the cache."""
    experts = config.experts
    found = {
        **only_by_torch(config),
        "a draft head (speculative_decoding_mode mtp or eagle3)": config.drafts,
        "latent attention": config.latent is not None,
        "recurrent layers": config.recurrent is not None,
        "gates of attention": config.attention_gate,
        "learned sinks": config.learned_sinks,
        "norms of rotated heads": config.norms_rotated,
        "soft caps of attention": config.attention_soft_cap is not None,
        "clamped SwiGLU": config.clamped_swiglu is not None,
        "biases of experts": experts is not None and experts.has_bias,
        "experts chosen otherwise than by softmax": experts is not None
        and (experts.scoring != "softmax" or experts.has_choice_bias or experts.has_float32_router),
        "groups of experts": experts is not None and experts.num_groups_per_token < experts.num_groups,
    }
    return tuple(name for name, is_there in found.items() if is_there)


def define_layers(
    graph: Graph, config: DecoderConfig, part: Part, settings: Settings, weights: Weights
) -> None:
    """Define the layers, from token ids to the last layer's output, with the caches.

    Args:
        graph: An empty graph.
        config: Configuration of the whole model.
        part: This rank's part of it.
        settings: The build's settings.
        weights: The part's weights.

    Raises:
        ConfigError: TensorRT does not define an operation.
    """
    _Layers(graph, config, part, settings).define(weights)


def define_head(
    graph: Graph, config: DecoderConfig, part: Part, settings: Settings, weights: Weights
) -> None:
    """Define the head, from rows of the last layer's output to normalized rows and logits; see `define_layers`.

    Each rank computes the logits of its part of the vocabulary, so that the head can run on one rank alone.
    """
    made = Components(graph, part.held_config(config), settings.dtype, part.shard.size)
    norm, head = weights.final_norm, weights.lm_head
    assert norm is not None and head is not None, "the part has the output projection"
    hidden = graph.input("hidden", settings.dtype, ("R", config.hidden_size))
    normalized = made.norm(hidden, norm, "final_norm")
    logits = graph.cast(made.biased(made.product(normalized, head, "lm_head"), head, "lm_head"), "float32")
    if config.logits_scale != 1:
        logits = graph.multiply(logits, made.number(config.logits_scale, 2, "float32"))
    if config.logits_soft_cap is not None:
        cap = made.number(config.logits_soft_cap, 2, "float32")
        logits = graph.multiply(graph.activation(graph.divide(logits, cap), "TANH"), cap)
    graph.output("normalized", normalized)
    graph.output("logits", logits)


class _Layers:
    def __init__(self, graph: Graph, config: DecoderConfig, part: Part, settings: Settings) -> None:
        self._graph, self._config, self._part, self._settings = graph, config, part, settings
        self._held, self._num_ranks = part.held_config(config), part.shard.size
        self._made = Components(graph, self._held, settings.dtype, self._num_ranks)
        self._windows = layer_windows(config.sliding_windows, (), 0, settings.max_seq_len)
        self._token_ids = graph.input("input_ids", "int32", ("T",))
        order = graph.input("slot_order", "int32", ("T",))
        self._order = order
        self._positions = graph.gather(graph.input("position_ids", "int32", ("T",)), order)
        self._back = graph.input("packed_order", "int32", ("T",))
        self._wanted = frozenset(meaning_of(name).number for name in settings.additional_outputs)
        self._adapters = NetworkAdapters(graph, self._held, settings, order)
        self._attention = self._make_attention()
        self._tables = {rope: self._rotary_tables(rope) for rope in dict.fromkeys(config.ropes)}
        temperature = config.attention_temperature
        self._query_factors = None
        if temperature is not None:
            factors = graph.constant(query_factors(temperature, settings.max_seq_len), "float32")
            self._query_factors = graph.unsqueeze(graph.gather(factors, self._positions), 1, 2)

    def define(self, weights: Weights) -> None:
        made = self._made
        x = self._embed(weights)
        for index, layer in enumerate(weights.layers):
            self._keep(index, x)
            name = f"layers.{index}"
            read = made.norm(x, layer.attention_norm, f"{name}.attention_norm")
            attended = self._attend(read, index, layer, name)
            attended = made.norm(attended, layer.attention_post_norm, f"{name}.attention_post_norm")
            after = self._add(x, attended)
            of = x if self._config.parallel_residual else after
            computed = self._mlp(made.norm(of, layer.mlp_norm, f"{name}.mlp_norm"), index, layer, name)
            x = self._add(after, made.norm(computed, layer.mlp_post_norm, f"{name}.mlp_post_norm"))
        self._keep(len(weights.layers), x)
        self._graph.output("hidden", self._graph.gather(x, self._back))

    def _make_attention(self) -> NetworkAttention:
        arguments = self._graph, self._settings, self._held, self._windows
        if self._settings.attention == "packed":
            return PackedAttention(*arguments)
        return SplitAttention(*arguments, positions=self._positions)

    def _keep(self, num_layers: int, x: Any) -> None:
        if num_layers in self._wanted:
            self._graph.output(f"hidden_states_{num_layers}", self._graph.gather(x, self._back))

    def _embed(self, weights: Weights) -> Any:
        graph, made, config = self._graph, self._made, self._config
        assert weights.embedding is not None, "the part has the embedding"
        table, dtype = graph.weight("embedding", weights.embedding), self._settings.dtype
        if self._num_ranks == 1:
            x = graph.gather(table, self._token_ids)
        else:
            x = made.summed(self._look_up_own(table))
        virtual = graph.input("virtual_embeddings", dtype, ("Nv", config.hidden_size))
        x = graph.gather(graph.concat((x, virtual), 0), graph.input("embedding_gather", "int32", ("T",)))
        x = graph.gather(x, self._order)
        if config.embedding_scale != 1:
            x = graph.multiply(x, made.number(config.embedding_scale, 2))
        if weights.position_embedding is not None:
            positions = self._positions
            if config.position_offset:
                positions = graph.add(positions, graph.constant(config.position_offset, "int32", 1))
            learned = graph.weight("position_embedding", weights.position_embedding)
            x = graph.add(x, graph.gather(learned, positions))
        return x

    def _look_up_own(self, table: Any) -> Any:
        """Return the embeddings of ids that this rank has, and zeros for other ids."""
        graph = self._graph
        begin, end = self._part.shard.split(self._config.vocab_size)
        own = graph.subtract(self._token_ids, graph.constant(begin, "int32", 1))
        zero, last = graph.constant(0, "int32", 1), graph.constant(end - begin - 1, "int32", 1)
        inside = graph.minimum(graph.maximum(own, zero), last)
        is_out = graph.unsqueeze(graph.subtract(own, inside), 1)  # 0 for ids that this rank has
        is_here = graph.cast(graph.equal(is_out, graph.constant(0, "int32", 2)), self._settings.dtype)
        return graph.multiply(graph.gather(table, inside), is_here)

    def _rotary_tables(self, rope: RopeConfig | None) -> tuple[Any, Any, int] | None:
        """Return tables of cos and sin, and the number of rotated dimensions of a head; None without rotation."""
        if rope is None:
            return None
        cos, sin = rope_tables(rope, self._config.rotary_head_dim, self._settings.max_seq_len)
        constants = self._graph.constant(cos, "float32"), self._graph.constant(sin, "float32")
        return *constants, 2 * cos.shape[1]

    def _attend(self, x: Any, index: int, layer: Layer[NetworkMatrix], name: str) -> Any:
        graph, made, held = self._graph, self._made, self._held
        heads, kv_heads, dim = held.num_heads, held.num_kv_heads, held.head_dim
        qkv = self._product(x, layer.qkv, index, f"{name}.qkv")
        ends = heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim
        queries = graph.columns(qkv, 0, ends[0])
        keys = graph.columns(qkv, ends[0], ends[1])
        values = graph.reshape(graph.columns(qkv, ends[1], ends[2]), -1, kv_heads, dim)
        queries = self._head(queries, heads, layer.query_norm, f"{name}.query_norm", self._config.num_heads)
        keys = self._head(keys, kv_heads, layer.key_norm, f"{name}.key_norm", self._config.num_kv_heads)
        tables = self._tables[self._config.ropes[index]]
        queries, keys = self._rotate(queries, tables), self._rotate(keys, tables)
        queries = graph.multiply(queries, made.number(held.score_scale, 3, "float32"))
        if self._query_factors is not None and held.has_temperature(index):
            queries = graph.multiply(queries, self._query_factors)
        dtype = self._settings.dtype
        read = self._attention.attend(
            index, graph.cast(queries, dtype), graph.cast(keys, dtype), values, self._windows[index]
        )
        return self._row_parallel(read, layer.output, index, f"{name}.output")

    def _head(self, x: Any, heads: int, norm: Norm | None, name: str, all_heads: int) -> Any:
        """Split a projection's output into heads and apply `norm`; return float32 [rows, heads, head_dim]."""
        graph, made, dim = self._graph, self._made, self._held.head_dim
        if norm is None:
            return graph.reshape(graph.cast(x, "float32"), -1, heads, dim)
        if self._config.qk_norm == "heads":
            return graph.cast(made.norm(graph.reshape(x, -1, heads, dim), norm, name), "float32")
        if self._num_ranks == 1:
            return graph.reshape(graph.cast(made.norm(x, norm, name), "float32"), -1, heads, dim)
        # If there are fewer heads than ranks, several ranks have the same head, which is counted once.
        wide = graph.cast(x, "float32")
        count = max(1, self._num_ranks // all_heads) * all_heads * dim
        squares = made.summed(graph.sum(graph.multiply(wide, wide), 1))
        mean = graph.divide(squares, made.number(count, 2, "float32"))
        deviation = graph.sqrt(graph.add(mean, made.number(self._config.norm_eps, 2, "float32")))
        normed = graph.multiply(graph.divide(wide, deviation), made.vector(norm.weight, f"{name}.weight", 2))
        rounded = graph.cast(normed, self._settings.dtype)
        return graph.reshape(graph.cast(rounded, "float32"), -1, heads, dim)

    def _rotate(self, x: Any, tables: tuple[Any, Any, int] | None) -> Any:
        """Rotate float32 [rows, heads, head_dim] by the rows' positions."""
        if tables is None:
            return x
        graph, (cos, sin, rotary_dim) = self._graph, tables
        _, heads, dim = x.shape
        positions = graph.reshape(self._positions, -1, 1)
        turned = graph.rotate(graph.reshape(x, -1, heads, 1, dim), cos, sin, positions, rotary_dim)
        return graph.reshape(turned, -1, heads, dim)

    def _mlp(self, x: Any, index: int, layer: Layer[NetworkMatrix], name: str) -> Any:
        graph, made, given = self._graph, self._made, None
        if layer.experts is not None:
            assert self._held.experts is not None, "the layer has experts"
            given = made.experts(x, layer.experts, self._held.experts, f"{name}.experts")
        if layer.up is None or layer.down is None:
            return made.summed(given)
        inner = made.activate(self._product(x, layer.up, index, f"{name}.up"))
        if given is None:
            return self._row_parallel(inner, layer.down, index, f"{name}.down")
        shared = self._product(inner, layer.down, index, f"{name}.down")
        if layer.experts is not None and (gate := layer.experts.shared_gate) is not None:
            weighed = made.product(x, NetworkMatrix(gate.weight), f"{name}.shared_gate")
            shared = graph.multiply(graph.activation(weighed, "SIGMOID"), shared)
        return made.summed(graph.add(given, shared))

    def _product(self, x: Any, matrix: NetworkMatrix, index: int, name: str) -> Any:
        """Return a layer's projection, with the output of adapters added."""
        y = self._adapters.add(self._made.product(x, matrix, name), x, index, name)
        return self._made.biased(y, matrix, name)

    def _row_parallel(self, x: Any, matrix: NetworkMatrix, index: int, name: str) -> Any:
        """Multiply with a weight whose inputs are divided among ranks; the bias is added once, to the sum."""
        y = self._adapters.add(self._made.product(x, matrix, name), x, index, name)
        return self._made.biased(self._made.summed(y), matrix, name)

    def _add(self, x: Any, computed: Any) -> Any:
        scale = self._config.residual_scale
        if scale != 1:
            computed = self._graph.multiply(computed, self._made.number(scale, 2))
        return self._graph.add(x, computed)


def check_additional_outputs(names: tuple[str, ...], num_layers: int) -> None:
    """Raise ConfigError unless all names are hidden states between the model's layers."""
    for name in names:
        meaning = meaning_of(name)
        if meaning.kind is not OutputKind.HIDDEN_STATES or not 0 <= meaning.number <= num_layers:
            raise ConfigError(
                f"additional output {name}, expected hidden_states_0 to hidden_states_{num_layers}: other "
                "additional outputs need no output of the plan"
            )
