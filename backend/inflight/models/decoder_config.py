"""One description of a decoder-only transformer for all families: numbers and names, no tensors.

Every family's config.json is translated into a `DecoderConfig` once, at load; later code does not depend on the
model's family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inflight.models.recurrent import RecurrentConfig

NormKind = Literal["rms", "layer"]
NormPlacement = Literal["before", "after", "around"]
QkNorm = Literal["heads", "projection", "unweighted"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear RoPE scaling: positions are divided by `factor`.

    Attributes:
        factor: Greater than 1 to extend the usable positions.
        original_max_positions: Positions the model was first trained with.
    """

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: no scaling up to the positions the model was trained with.

    In longer sequences the base grows by `factor` with every further token, for all tokens at once. Cached
    keys would have to be recomputed, so sequences here are never longer.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.

    Attributes:
        factor: Divides the frequencies of long wavelengths.
        low_freq_factor: Wavelengths above original_max_positions / low_freq_factor are long.
        high_freq_factor: Wavelengths below original_max_positions / high_freq_factor are short.
        original_max_positions: Positions the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: a ramp over the dimensions from unscaled to scaled frequencies, and a factor on cos and sin.

    Attributes:
        factor: Divides the scaled frequencies.
        original_max_positions: Positions the model was first trained with.
        beta_fast: Dimensions that turn more often than this over the original positions stay unscaled.
        beta_slow: Dimensions that turn less often than this are fully scaled.
        attention_factor: Multiplies cos and sin.
        truncate: Whether the ramp begins and ends at whole dimensions.
        all_dim_factor: The factor computed from `mscale_all_dim` and `factor`; 1 if not given. Latent attention
            multiplies all of queries and keys by it, not only rotated dimensions; other attentions ignore it.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    all_dim_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: each pair of dimensions has its own factor, and there are two sets of factors.

    Cached keys are valid for one set only, so an engine uses one set for all sequences: the short one if no
    sequence can be longer than the model was first trained with, else the long one. transformers changes the
    set as a sequence grows, which changes results that were already computed.

    Attributes:
        short_factors: Divide the frequencies, one per rotated pair, in short sequences.
        long_factors: Divide the frequencies, one per rotated pair, in long sequences.
        original_max_positions: Positions the model was first trained with.
        attention_factor: Multiplies cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Proportional RoPE: the first pairs of a head turn as in a head that is rotated whole, the others do not.

    Pairs are those of the whole head, dimensions i and i + head_dim / 2.

    Attributes:
        part: Fraction of the pairs that turn.
        factor: Divides the frequencies.
    """

    part: float
    factor: float


RopeScaling = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of a layer.

    Attributes:
        theta: Base of the angles.
        scaling: Scaling for longer contexts; None: no scaling.
        partial_factor: Rotated fraction of each head: its first dimensions; the others have no positions.
        interleaved: Whether the checkpoint's model rotates dimensions 2i and 2i + 1 together, instead of i and
            i + rotary_dim / 2. Rows of query and key projections are put into the latter order when they are read,
            which leaves all scores as they are.
    """

    theta: float
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_factor)

    def rows_in_halves(self, head_dim: int) -> tuple[tuple[int, int, int], ...]:
        """Return ranges, with steps, of a head's stored rows that put them into the order of the rotation."""
        rotated = self.rotary_dim(head_dim) if self.interleaved else 0
        ranges = (0, rotated, 2), (1, rotated, 2), (rotated, head_dim, 1)
        return tuple(each for each in ranges if each[0] < each[1])


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """A clamped SwiGLU, which replaces act(gate) * up in gated MLPs: gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        alpha: Steepness of the sigmoid.
        limit: Before this formula, gate is clamped to at most `limit`, and up to -limit .. limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts, which replace the MLP in some layers: a router sends each token to some experts.

    Attributes:
        count: Number of experts in a layer.
        num_per_token: Number of experts per token: those with the highest probabilities.
        intermediate_size: Inner width of an expert.
        is_normalized: Whether the probabilities of the chosen experts, which weight their results, are divided by
            their sum.
        layers: For each layer of the model, whether it has experts; otherwise it has the MLP.
        shared_intermediate_size: Inner width of an additional MLP that every token goes through; 0: there is none.
        has_shared_gate: Whether the result of that MLP is multiplied by sigmoid(a linear layer with one output).
        scoring: Function from router logits to probabilities: softmax over all experts, or sigmoid of each logit.
        has_choice_bias: Whether each expert has a bias that is added to its probability when experts are chosen,
            but not when results are weighted.
        num_groups: Number of equally large groups of consecutive experts.
        num_groups_per_token: Number of groups from which the experts of a token are chosen.
        scores_per_group: Number of the highest probabilities in each group whose sum ranks the groups.
        result_scale: Factor of the probabilities that weight results.
        has_float32_router: Whether the router is computed in float32, whatever the dtype of the model.
        has_router_bias: Whether the router has biases.
        has_bias: Whether both projections of every expert have biases.
        has_norms: Whether router and experts each read the residual stream through a norm of their own, and the
            results of the experts and of the shared MLP have norms before they are added.
        has_expert_scales: Whether each expert has a learned factor of its weight.
        weighs_inputs: Whether the weights of the chosen experts multiply their inputs instead of their results.
        latent_size: Width of the vectors that experts read and write, which are projections of hidden states, and
            are projected to hidden states; 0: they are hidden states.
        held: First expert of this rank and the index after the last; None: all. Every rank has the whole router;
            other ranks compute the experts that are not held.
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

    For each token, the cache holds this vector, the compressed latent, and one key that all heads share. A head's
    queries and keys have two parts: one without positions, whose keys are projected from the latent, and a rotated
    one, whose key is the shared key.

    Instead of projecting the latents to keys and values, one can multiply queries by the key projection, and the
    weighted sum of latents by the value projection. Attention then has a single key head that is as wide as the
    cached data, and whose values are its keys. A DecoderConfig with latent attention describes this form:
    num_kv_heads is 1, head_dim is `kv_rank + rope_head_dim`, and attention_scale is given.

    Attributes:
        query_rank: Width of the vector that queries are projected from; None: they are projected from hidden
            states.
        kv_rank: Width of the compressed latent.
        nope_head_dim: Width of the part of a head without positions.
        rope_head_dim: Width of the rotated part of a head, and of the shared key.
        value_head_dim: Width of a head's values.
        interleaved: Whether dimensions 2i and 2i + 1 are rotated together, instead of i and i + rope_head_dim / 2.
        norm_eps: Epsilon of the norms on the compressed latent and on the vector that queries are projected from.
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
    """A temperature of attention that depends on the position, in layers without rotary positions.

    Queries at position p are multiplied by 1 + growth * log(1 + floor((p + 1) / interval)).

    Attributes:
        growth: Factor of the logarithm.
        interval: Number of positions with the same factor.
    """

    growth: float
    interval: float


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Fixed factors of activations in every layer (maximal update parametrization); 1 changes nothing.

    Attributes:
        attention_input: Factor of attention's input.
        attention_output: Factor of the result of attention.
        recurrent_input: Factor of a recurrent layer's input.
        recurrent_sections: Factors of the sections of its input projection's output; empty: 1.
        recurrent_output: Factor of its result.
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
    """The sizes of one layer in a model whose layers differ; the meaning is that of `DecoderConfig`'s fields."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerInputsConfig:
    """Per-layer embeddings: every layer has an input of its own for each token, beside the residual stream.

    It is the sum of the token's row of another embedding, and of a projection of its ordinary embedding. After the
    MLP, it multiplies the activation of a projection of the residual stream, and the product's projection is added
    to the stream.

    Attributes:
        size: Width of one layer's input.
        vocab_size: Number of rows of that embedding.
        virtual_id: The token whose row virtual tokens have, which have none of their own.
    """

    size: int
    vocab_size: int
    virtual_id: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture of a decoder: everything besides weights that its forward pass depends on.

    Attributes:
        vocab_size: Number of token ids, that is, of rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides num_heads.
        head_dim: Width of one head; num_heads * head_dim need not be hidden_size.
        intermediate_size: Inner width of the MLP.
        max_positions: Longest sequence in tokens: rows of learned positions, or the maximum for rotary ones.
        norm: RMSNorm (weight) or LayerNorm (weight and bias).
        norm_bias: Whether the checkpoint has the biases of LayerNorms; they are 0 otherwise.
        norm_eps: Added to the variance.
        activation: Activation in the MLP; gelu_tanh is the tanh approximation, relu2 the square of relu, and xielu
            has learned parameters of each layer.
        gated_mlp: Whether the MLP is down(act(gate(x)) * up(x)) instead of down(act(up(x))).
        clamped_swiglu: Replaces act(gate) * up in gated MLPs and experts; None: it is not replaced.
        ropes: Rotary positions of each layer; None: the layer has none.
        qkv_bias: Whether the query, key and value projections have biases.
        output_bias: Whether attention's output projection has a bias.
        mlp_bias: Whether the MLP has biases.
        qk_norm: RMSNorm over queries and keys before the rotation: over each head, or over all heads together; or
            over each head, in layers that rotate, with 1 as all weights. None: there is none.
        norms_rotated: Whether that norm, over each head, comes after the rotation.
        sliding_windows: For each layer, the number of keys that a token attends to, itself included; None: all up
            to itself.
        attention_chunks: For each layer, the length of chunks of a sequence: a token attends to those of its chunk
            up to itself; None: there are no chunks. Empty: no layer has chunks.
        attention_temperature: Temperature of attention; None: queries are the same at every position.
        tied_embeddings: Whether the output projection is the embedding, unless the checkpoint has another.
        learned_positions: Whether an embedding of each position is added to the input.
        position_offset: Number of rows of that embedding before the row of position 0.
        norm_placement: Position of a layer's norms: on the inputs of attention and MLP, on their outputs before
            these are added to the residual stream, or both.
        norm_offset: Added to the stored weights of norms.
        parallel_residual: Whether attention and MLP read the same input, each through its own norm, and both
            results are added.
        attention_scale: Factor of queries times keys; None: head_dim ** -0.5.
        learned_sinks: Whether each query head has a learned score that is one more term of the softmax's sum
            but has no value: the weights of the values then sum to less than 1.
        attention_soft_cap: Scores become cap * tanh(score / cap); None: they are unchanged.
        logits_soft_cap: The same for logits.
        embedding_scale: Factor of token embeddings.
        residual_scale: Factor of the results of attention and MLP that are added to the residual stream.
        logits_scale: Factor of the logits.
        attention_gate: Whether the result of attention is multiplied by the sigmoid of gates, one for each column,
            from a linear layer of the attention's input.
        head_gates: Whether the result of each head is multiplied by the sigmoid of one gate, likewise.
        recurrent: Recurrent layer that replaces attention in some layers, or is beside it; None: there is none.
        recurrent_layers: Whether each layer has it; empty if no layer has.
        recurrent_activation: Activation after its convolution; None: that of the MLP.
        attention_layers: Whether each layer has attention; empty: those without recurrent layer. Where a layer has
            both, they read the same input, and both results are added.
        mlp_layers: Whether each layer has an MLP or experts; empty: every layer.
        multipliers: Fixed factors of activations; None: all are 1.
        experts: Experts that replace the MLP in some layers; None: no layer has experts.
        num_draft_layers: Number of additional layers that a checkpoint may have for drafting tokens; not read.
        latent: Latent attention, which changes the meaning of num_kv_heads and head_dim; None: ordinary attention.
        layer_sizes: The sizes of each layer, if layers differ: the fields above are then the largest; empty: every
            layer has those.
        keys_are_values: For each layer, whether the key projection's output is also the values, before norms and
            rotation; empty: every layer has a value projection.
        value_norm: Whether each value head has an RMSNorm, which has no weights.
        kv_layers: For each layer, the layer whose keys and values it reads: itself, or an earlier one of the same
            sizes, and it has neither key nor value projection; empty: every layer has its own.
        layer_scales: Whether the residual stream after each layer is multiplied by a learned number.
        layer_inputs: Per-layer embeddings; None: there are none.
        eos_token_ids: End ids from generation_config.json, else from config.json.
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
    attention_temperature: AttentionTemperature | None = None
    qk_norm: QkNorm | None = None
    norms_rotated: bool = False
    learned_positions: bool = False
    position_offset: int = 0
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
    recurrent_activation: Activation | None = None
    attention_layers: tuple[bool, ...] = ()
    mlp_layers: tuple[bool, ...] = ()
    multipliers: Multipliers | None = None
    clamped_swiglu: ClampedSwiglu | None = None
    experts: ExpertsConfig | None = None
    num_draft_layers: int = 0
    latent: LatentAttention | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()
    keys_are_values: tuple[bool, ...] = ()
    value_norm: bool = False
    kv_layers: tuple[int, ...] = ()
    layer_scales: bool = False
    layer_inputs: LayerInputsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

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
        """Return whether a layer is recurrent instead of having attention."""
        return self.has_state(layer) and not self.has_attention(layer)

    def has_state(self, layer: int) -> bool:
        """Return whether a layer has a recurrent state, in place of attention or beside it."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

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
        return not self.kv_layers or self.kv_layers[layer] == layer

    def at(self, layer: int) -> DecoderConfig:
        """Return this configuration with the sizes of one layer as those of all."""
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
        """Return the configuration of a model of one layer with attention, which has the sizes of `layer`."""
        return replace(
            self.at(layer),
            num_layers=1,
            recurrent_layers=(),
            attention_layers=(),
            mlp_layers=(),
            kv_layers=(),
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
        """Number of cached values per token and layer: keys and values, counted once if both are the same."""
        return 2 * self.kv_size if self.latent is None else self.kv_size

    @property
    def rotary_head_dim(self) -> int:
        """Width to which partial_factor applies: a head, or with latent attention its rotated part."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def output_head_dim(self) -> int:
        """Width of a head's part of the output projection's input."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim
