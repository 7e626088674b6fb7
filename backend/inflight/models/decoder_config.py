"""The description of a decoder-only transformer, the same for all families: numbers and names, no tensors.

Every family's config.json is translated into a `DecoderConfig` once, at load; later code does not depend on the
model's family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inflight.models.recurrent import RecurrentConfig, Section
from inflight.models.rope_config import RopeConfig

NormKind = Literal["rms", "layer"]
NormPlacement = Literal["before", "after", "around"]
QkNorm = Literal["heads", "projection", "unweighted"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """A clamped SwiGLU, which replaces act(gate) * up in gated MLPs: gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        alpha: Steepness of the sigmoid.
        limit: Before the formula, gate is clamped to at most `limit`, and up to -limit .. limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts, which replace the MLP in some layers: a router sends each token to some experts.

    Attributes:
        count: Number of experts in a layer.
        num_per_token: Number of experts per token, which are the experts with the highest probabilities.
        intermediate_size: Inner width of an expert.
        is_normalized: Whether the probabilities of the chosen experts, which weight their results, are divided by
            their sum.
        layers: For each layer of the model, whether it has experts instead of the MLP.
        shared_intermediate_size: Inner width of the shared MLP, which computes every token; 0: there is none.
        has_shared_gate: Whether the shared MLP's result is multiplied by sigmoid(a linear layer with one output).
        scoring: Function from router logits to probabilities: softmax over all experts, or sigmoid of each logit.
        has_choice_bias: Whether each expert has a bias that is added to its probability when experts are chosen,
            but not when results are weighted.
        num_groups: Number of equally large groups of consecutive experts.
        num_groups_per_token: Number of groups from which the experts of a token are chosen.
        scores_per_group: Groups are ranked by the sum of this many of their highest probabilities.
        result_scale: Factor of the weights of results.
        has_float32_router: Whether the router is computed in float32, whatever the dtype of the model.
        has_router_bias: Whether the router has biases.
        has_bias: Whether both projections of every expert have biases.
        has_norms: Whether router and experts each have a norm on their input, the residual stream, and the
            results of experts and shared MLP have norms before they are added.
        has_expert_scales: Whether each expert has a learned factor by which its weight is multiplied.
        weighs_inputs: Whether the weights of the chosen experts multiply their inputs instead of their results.
        latent_size: Width of the experts' inputs and outputs if hidden states are projected to them and back; 0:
            experts read and write hidden states.
        held: First expert of this rank and the index after its last one; None: the rank has all experts.
            Every rank has the whole router; other ranks compute the other experts.
    """

    count: int
    num_per_token: int
    intermediate_size: int
    is_normalized: bool
    layers: tuple[bool, ...]
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    scoring: Scoring = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_groups_per_token: int = 1
    scores_per_group: int = 1
    result_scale: float = 1.0
    has_float32_router: bool = False
    has_router_bias: bool = False
    has_bias: bool = False
    has_norms: bool = False
    has_expert_scales: bool = False
    weighs_inputs: bool = False
    latent_size: int = 0
    held: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are projections of one vector.

    For each token, the cache has this vector, the compressed latent, and one key that all heads share. A head's
    queries and keys have two parts: a part without rotation, whose keys are projected from the latent, and a
    rotated part, whose key is the shared key.

    Instead of projecting the latents to keys and values, one can multiply queries by the key projection, and the
    weighted sum of latents by the value projection. Attention then has a single key head, which is as wide as the
    cached data and whose values are its keys. A DecoderConfig with latent attention describes this form:
    num_kv_heads is 1, head_dim is `kv_rank + rope_head_dim`, and attention_scale is set.

    Attributes:
        query_rank: Width of the vector from which queries are projected; None: queries are projected from hidden
            states.
        kv_rank: Width of the compressed latent.
        nope_head_dim: Width of a head's part without rotation (no position embedding).
        rope_head_dim: Width of the rotated part of a head, and of the shared key.
        value_head_dim: Width of a head's values.
        interleaved: Whether dimensions 2i and 2i + 1 are rotated together, instead of i and i + rope_head_dim / 2.
        norm_eps: Epsilon of the norms on the compressed latent and on the vector of width `query_rank`.
    """

    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    interleaved: bool
    norm_eps: float = 1e-6

    @property
    def query_head_dim(self) -> int:
        """Width of both parts of a query head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Number of cached values per token and layer."""
        return self.kv_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """A temperature of attention that depends on the position.

    Queries at position p are multiplied by 1 + growth * log(1 + floor((p + first_position) / interval)).

    Attributes:
        growth: Factor of the logarithm.
        interval: Number of consecutive positions with equal factors.
        first_position: Number by which the first position is counted: 0 or 1.
        is_everywhere: Whether all layers have it; otherwise those without rotary positions.
    """

    growth: float
    interval: float
    first_position: int
    is_everywhere: bool


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (ALiBi), in place of rotary or learned positions.

    To each score, a head adds its slope times the key's position, minus the same for the query's position.

    Attributes:
        slopes: The slope of each query head.
        scale: Factor of the products of slopes and positions.
        is_rounded: Whether slopes, positions and their products are rounded to bfloat16.
    """

    slopes: tuple[float, ...]
    scale: float = 1.0
    is_rounded: bool = False


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Fixed factors of activations in every layer (maximal update parametrization); a factor of 1 has no effect.

    Attributes:
        attention_input: Factor of attention's input.
        attention_output: Factor of the result of attention.
        recurrent_input: Factor of a recurrent layer's input.
        recurrent_sections: Factors of the sections of a recurrent layer's input projection's output; empty:
            all are 1.
        recurrent_output: Factor of a recurrent layer's result.
        mlp_gate: Factor of the MLP's gates, before the activation.
        mlp_output: Factor of the MLP's result.
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    recurrent_input: float = 1.0
    recurrent_sections: tuple[float, ...] = ()
    recurrent_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of one layer in a model whose layers differ; see the fields of `DecoderConfig`."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerInputsConfig:
    """Per-layer embeddings: besides the residual stream, every layer gets another embedding of each token.

    A per-layer embedding is the sum of the token's row in a separate table and of a projection of the token's
    ordinary embedding. After the MLP, the residual stream is projected and activated, multiplied by the per-layer
    embedding, projected back, and added to the residual stream.

    Attributes:
        size: Width of one layer's embedding.
        vocab_size: Number of rows of the separate table.
        virtual_id: The token whose row of the separate table is used for virtual tokens, and for tokens without
            a row.
    """

    size: int
    vocab_size: int
    virtual_id: int


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Alternating updates (AltUp): several residual streams, of which each layer reads and changes one.

    Before a layer, every stream is predicted as a mixture of all streams. The layer computes a new value of one
    of them, the active stream. Its difference from the predicted value, times factors that depend on the new
    value, corrects all streams.

    Attributes:
        num_streams: Number of streams, at least 2.
        active: Index of the active stream.
        has_output_scale: Whether per-layer embeddings read the corrected active stream times a learned vector.
    """

    num_streams: int
    active: int
    has_output_scale: bool


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head, which drafts tokens and comes from a folder of its own.

    Attributes:
        layer: The head's only layer; its `vocab_size` is the number of tokens that the head can guess.
        read_layers: Three numbers of the model's layers, 0 to `num_layers`: the head reads the hidden states after
            these numbers of layers, where 0 stands for the embeddings.
    """

    layer: DecoderConfig
    read_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gemma4HeadConfig:
    """A draft head of Gemma 4, which comes from a folder of its own.

    Attributes:
        layers: The head's layers, with `DecoderConfig.read_kv`.
        num_clusters: Number of equally large clusters of tokens; 0: every token gets a logit.
        clusters_per_token: Number of the likeliest clusters whose tokens get logits; 0 without clusters.
    """

    layers: DecoderConfig
    num_clusters: int
    clusters_per_token: int

    @property
    def num_logits(self) -> int:
        """Number of products with rows of embedding and clusters that a guess takes."""
        if not self.num_clusters:
            return self.layers.vocab_size
        return self.num_clusters + self.clusters_per_token * self.layers.vocab_size // self.num_clusters


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture of a decoder: everything except weights on which its forward pass depends.

    Attributes:
        vocab_size: Number of token ids, which is the number of rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides num_heads.
        head_dim: Width of one head; num_heads * head_dim need not be hidden_size.
        intermediate_size: Inner width of the MLP.
        max_positions: Longest sequence in tokens: the number of learned positions, or the maximum for
            rotary positions.
        norm: RMSNorm (weight) or LayerNorm (weight and bias).
        norm_bias: Whether the checkpoint has the biases of LayerNorms; they are 0 otherwise.
        norm_eps: Epsilon of norms, which is added to the variance.
        activation: Activation in the MLP; gelu_tanh is the tanh approximation, relu2 the square of relu, and xielu
            has learned parameters of each layer.
        gated_mlp: Whether the MLP is down(act(gate(x)) * up(x)) instead of down(act(up(x))).
        clamped_swiglu: Replaces act(gate) * up in gated MLPs and experts; None: it is not replaced.
        ropes: Rotary positions of each layer; None: the layer has none.
        qkv_bias: Whether the query, key and value projections have biases.
        output_bias: Whether attention's output projection has a bias.
        mlp_bias: Whether the MLP has biases.
        qk_norm: RMSNorm over queries and keys before the rotation: "heads", over each head; "projection",
            over all heads together; "unweighted", over each head in layers with rotation, without weights.
            None: there is none.
        norms_rotated: Whether `qk_norm`, over each head, is applied after the rotation.
        sliding_windows: For each layer, the number of keys to which a token attends, its own included;
            None: all keys up to its own.
        attention_chunks: For each layer, the length of the chunks into which sequences are divided: a token
            attends to the keys of its chunk up to its own; None: no chunks in this layer. Empty: no layer has
            chunks.
        bidirectional_layers: For each layer, whether the rows of a picture attend to all of its rows, also to
            later ones. Empty: in no layer.
        attention_temperature: Temperature of attention; None: queries are the same at every position.
        alibi: Linear biases of attention scores; None: there are none.
        tied_embeddings: Whether the embedding is also the output projection, unless the checkpoint has
            another one.
        learned_positions: Whether a learned embedding of each position is added to the input.
        position_offset: Number of rows of the position embedding before the row of position 0.
        embedding_norm: Whether embeddings have a norm.
        norm_placement: Position of a layer's norms: on the inputs of attention and MLP, on their outputs
            before the addition to the residual stream, or both.
        norm_offset: Added to the stored weights of norms.
        parallel_residual: Whether attention and MLP read the same input, each through its own norm, and both
            results are added.
        attention_scale: Factor of queries times keys; None: head_dim ** -0.5.
        learned_sinks: Whether each query head has a learned score that is one more term of the softmax's sum
            but has no value: the weights of the values then sum to less than 1.
        attention_soft_cap: Scores become cap * tanh(score / cap); None: they are unchanged.
        logits_soft_cap: Logits become cap * tanh(logit / cap); None: they are unchanged.
        embedding_scale: Factor of token embeddings.
        residual_scale: Factor of the results of attention and MLP that are added to the residual stream.
        logits_scale: Factor of the logits.
        attention_gate: Whether the result of attention is multiplied by the sigmoid of gates, one for each column,
            from a linear layer of the attention's input.
        head_gates: Whether the result of each head is multiplied by the sigmoid of one gate, from a linear
            layer of the attention's input.
        recurrent: The recurrent part that some layers have instead of attention, or besides it; None: there
            is none.
        recurrent_layers: For each layer, whether it has a recurrent part; empty: no layer has one.
        recurrent_modules: For each module that checkpoints store of the recurrent part's input projection, the
            number of its sections.
        recurrent_by_key_head: Whether such a module has all its sections of the first key head, then of the next
            key head.
        recurrent_activation: Activation after the recurrent part's convolution; None: the MLP's activation.
        attention_layers: For each layer, whether it has attention; empty: the layers without a recurrent
            part have it. In a layer with both, both read the same input, and both results are added.
        mlp_layers: Whether each layer has an MLP or experts; empty: every layer.
        multipliers: Fixed factors of activations; None: all are 1.
        experts: Experts that replace the MLP in some layers; None: no layer has experts.
        num_draft_layers: Number of additional layers that a checkpoint may have for drafting tokens.
        has_draft_head: Whether the first of them is read, to draft tokens (`draft_layer`).
        eagle: The EAGLE-3 head that drafts tokens instead; None: there is none.
        gemma4_head: The draft head of Gemma 4 that drafts tokens instead; None: there is none.
        read_kv: In such a head, for each of its layers, the layer whose keys and values it reads, counted among
            the model's `cached_layers`; empty in models.
        latent: Latent attention, which changes the meaning of num_kv_heads and head_dim; None: ordinary attention.
        layer_sizes: The sizes of each layer, if layers differ; then `num_kv_heads`, `head_dim` and
            `intermediate_size` are the largest. Empty: these fields apply to every layer.
        keys_are_values: For each layer, whether the key projection's output is also the values, before norms and
            rotation; empty: every layer has a value projection.
        value_norm: Whether each value head has an RMSNorm, which has no weights.
        kv_layers: For each layer, the layer whose keys and values it reads: itself, or an earlier layer of
            equal sizes; then it has neither key nor value projection. Empty: every layer reads its own.
        layer_scales: Whether the residual stream after each layer is multiplied by a learned number.
        layer_inputs: Per-layer embeddings; None: there are none.
        altup: Several residual streams, in a model with per-layer embeddings; None: there is one stream.
        laurel_rank: Inner width of a low-rank branch beside attention, which reads attention's input; the sum of
            residual stream and both results is divided by the square root of 2 (LAuReL). 0: there is none.
        gate_sparsity: For each layer, the expected fraction of the MLP's gates that a threshold, which depends on
            the row's mean and deviation, sets to 0 before the activation; with 0 there is no threshold. Empty: no
            layer has one.
        num_added_layers: Number of first layers after which rows of pictures may be added to the residual stream
            (DeepStack).
        eos_token_ids: End ids from generation_config.json, otherwise from config.json.
        dtype: The checkpoint's dtype: float32, bfloat16 or float16; None if config.json does not state it.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    ropes: tuple[RopeConfig | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    tied_embeddings: bool
    attention_chunks: tuple[int | None, ...] = ()
    bidirectional_layers: tuple[bool, ...] = ()
    attention_temperature: AttentionTemperature | None = None
    alibi: Alibi | None = None
    qk_norm: QkNorm | None = None
    norms_rotated: bool = False
    learned_positions: bool = False
    position_offset: int = 0
    embedding_norm: bool = False
    norm_placement: NormPlacement = "before"
    norm_offset: float = 0.0
    norm_bias: bool = True
    parallel_residual: bool = False
    attention_scale: float | None = None
    learned_sinks: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_gate: bool = False
    head_gates: bool = False
    recurrent: RecurrentConfig | None = None
    recurrent_layers: tuple[bool, ...] = ()
    recurrent_modules: tuple[int, ...] = ()
    recurrent_by_key_head: bool = False
    recurrent_activation: Activation | None = None
    attention_layers: tuple[bool, ...] = ()
    mlp_layers: tuple[bool, ...] = ()
    multipliers: Multipliers | None = None
    clamped_swiglu: ClampedSwiglu | None = None
    experts: ExpertsConfig | None = None
    num_draft_layers: int = 0
    has_draft_head: bool = False
    eagle: Eagle3Config | None = None
    gemma4_head: Gemma4HeadConfig | None = None
    read_kv: tuple[int, ...] = ()
    latent: LatentAttention | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()
    keys_are_values: tuple[bool, ...] = ()
    value_norm: bool = False
    kv_layers: tuple[int, ...] = ()
    layer_scales: bool = False
    layer_inputs: LayerInputsConfig | None = None
    altup: AltUpConfig | None = None
    laurel_rank: int = 0
    gate_sparsity: tuple[float, ...] = ()
    num_added_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def multimodal_rotary_dim(self) -> int:
        """Number of rotated dimensions of a head with multimodal rotary embedding (mRoPE); 0 without it."""
        ropes = set(self.ropes) - {None}
        (rope,) = ropes if len(ropes) == 1 else (None,)
        return rope.rotary_dim(self.rotary_head_dim) if rope is not None and rope.is_multimodal else 0

    @property
    def dense_width(self) -> int:
        """Inner width of the MLP of layers without experts; 0 if there is no such MLP."""
        layers = range(self.num_layers)
        has_any = any(self.has_mlp(layer) and not self.has_experts(layer) for layer in layers)
        return self.intermediate_size if has_any else 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of the MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has a recurrent part and no attention."""
        return self.has_state(layer) and not self.has_attention(layer)

    def has_state(self, layer: int) -> bool:
        """Return whether a layer has a recurrent state, instead of attention or besides it."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    def recurrent_sections(self, module: int) -> tuple[Section, ...]:
        """Return the sections of one stored module of the recurrent layers' input projection."""
        assert self.recurrent is not None, "there is no recurrent part"
        begin = sum(self.recurrent_modules[:module])
        return self.recurrent.sections[begin : begin + self.recurrent_modules[module]]

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return self.attention_layers[layer] if self.attention_layers else not self.has_state(layer)

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def has_values(self, layer: int) -> bool:
        """Return whether a layer has a value projection, or another layer's values."""
        return not (self.keys_are_values and self.keys_are_values[layer])

    def has_own_kv(self, layer: int) -> bool:
        """Return whether a layer with attention computes keys and values, instead of reading another layer's."""
        return not self.read_kv and (not self.kv_layers or self.kv_layers[layer] == layer)

    @property
    def first_read_layer(self) -> int | None:
        """The first layer whose keys and values a later layer reads; None if there is none."""
        return min((read for layer, read in enumerate(self.kv_layers) if read < layer), default=None)

    @property
    def stage_width(self) -> int:
        """Width of the rows that a pipeline stage sends to the next one: all residual streams, the token embedding
        if there are per-layer embeddings, which every stage makes from it for its own layers, and the hidden
        states that an EAGLE-3 head reads."""
        num_streams = 1 if self.altup is None else self.altup.num_streams
        num_states = 0 if self.eagle is None else len(self.eagle.read_layers)
        return (num_streams + (self.layer_inputs is not None) + num_states) * self.hidden_size

    def has_temperature(self, layer: int) -> bool:
        """Return whether a layer's queries depend on the temperature of attention."""
        temperature = self.attention_temperature
        return temperature is not None and (temperature.is_everywhere or self.ropes[layer] is None)

    def at(self, layer: int) -> DecoderConfig:
        """Return this configuration with the sizes of `layer` for all layers."""
        if not self.layer_sizes:
            return self
        sizes = self.layer_sizes[layer]
        return replace(
            self,
            layer_sizes=(),
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
        )

    def only(self, layer: int) -> DecoderConfig:
        """Return the configuration of a model with one layer, which has attention and the sizes of `layer`."""
        return replace(
            self.at(layer),
            num_layers=1,
            recurrent_layers=(),
            attention_layers=(),
            mlp_layers=(),
            kv_layers=(),
        )

    @property
    def drafts(self) -> bool:
        """Whether a draft head guesses tokens: the checkpoint's own, an EAGLE-3 head or a head of Gemma 4."""
        return self.has_draft_layer or self.gemma4_head is not None

    @property
    def has_draft_layer(self) -> bool:
        """Whether the draft head has one layer, whose keys and values are cached beside the model's."""
        return self.has_draft_head or self.eagle is not None

    @property
    def draft_layer(self) -> DecoderConfig:
        """The configuration of the draft head's only layer: the EAGLE-3 head's, or that of the last layer that
        has attention."""
        if self.eagle is not None:
            return self.eagle.layer
        last = self.cached_layers[-1]
        return replace(
            self.only(last),
            ropes=self.ropes[last : last + 1],
            sliding_windows=self.sliding_windows[last : last + 1],
            recurrent=None,
            experts=self.experts and replace(self.experts, layers=self.experts.layers[last : last + 1]),
            num_draft_layers=0,
            has_draft_head=False,
        )

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are cached."""
        layers = range(self.num_layers)
        return tuple(each for each in layers if self.has_attention(each) and self.has_own_kv(each))

    @property
    def score_scale(self) -> float:
        """Factor of queries times keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_size(self) -> int:
        """Number of cached values per token and layer: of keys and values, or of keys alone if values are part
        of them."""
        return 2 * self.kv_size if self.latent is None else self.kv_size

    @property
    def rotary_head_dim(self) -> int:
        """Width to which `RopeConfig.partial_factor` applies: a head, or with latent attention its rotated
        part."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def output_head_dim(self) -> int:
        """Width of a head's part of the output projection's input."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim
