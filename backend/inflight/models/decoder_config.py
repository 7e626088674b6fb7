"""One description of a decoder-only transformer for all families: plain numbers and names, no tensors.

Every family's config.json is translated into a `DecoderConfig` once, at load; nothing behind it asks which family
a model belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer"]
NormPlacement = Literal["before", "after", "around"]
QkNorm = Literal["heads", "projection"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`.

    Attributes:
        factor: More than 1 to reach further.
        original_max_positions: Positions the model was first trained with.
    """

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: no scaling up to the positions the model was trained with.

    In longer sequences the base grows by `factor` with every further token, for all tokens at once; keys that were
    cached before would have to be computed again, so no sequence is longer here.
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
        all_dim_factor: What `mscale_all_dim` makes of `factor`, 1 without it. Latent attention multiplies queries
            and keys by it, rotated dimensions or not; other attentions do not use it.
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
    """LongRoPE: each pair of dimensions has a factor of its own, and there are two sets of these.

    Keys that are cached stand for the positions of one set, so an engine uses one for all sequences: the short one
    where no sequence can be longer than the model was first trained with, else the long one. transformers changes
    from one to the other as a sequence grows, which changes what was computed before.

    Attributes:
        short_factors: Divide the frequencies, one for each rotated pair.
        long_factors: Likewise.
        original_max_positions: Positions the model was first trained with.
        attention_factor: Multiplies cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of a layer.

    Attributes:
        theta: Their base.
        scaling: How long contexts are reached, if at all.
        partial_factor: Which part of each head is rotated, its first dimensions; the others have no positions.
    """

    theta: float
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.partial_factor)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """A clamped SwiGLU, in gated MLPs in place of act(gate) * up: gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        alpha: How steep the sigmoid is.
        limit: Before that, gate is clamped to at most this, and up to -limit .. limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts in the place of some layers' MLP: a router sends each token to a few of many.

    Attributes:
        count: Experts of a layer.
        num_per_token: To how many of them each token goes: those with the highest probabilities.
        intermediate_size: Width inside an expert.
        is_normalized: Whether the probabilities of these, which weigh their results, are divided by their sum.
        layers: Per layer of the model whether it has experts; else it has the MLP.
        shared_intermediate_size: Width of an MLP beside them that every token goes through; 0: there is none.
        has_shared_gate: Whether that one's result is multiplied by sigmoid(a linear layer with one output).
        scoring: What makes an expert's probability of the router's logits: softmax over all, or sigmoid of its
            own.
        has_choice_bias: Whether each expert has a bias that is added to its probability where experts are chosen,
            and not where results are weighed.
        num_groups: The experts are in so many groups of equal size, one after another.
        num_groups_per_token: From how many groups the experts of a token are.
        scores_per_group: Those groups are chosen by the sum of so many of the highest probabilities in each.
        result_scale: Multiplies the probabilities that weigh results.
        has_float32_router: Whether the router is multiplied in float32, whatever the dtype of the model.
        has_router_bias: Whether the router has biases.
        has_bias: Whether both projections of every expert have biases.
        held: The first expert that this rank has, and the one behind the last; None: all. The router is whole on
            every rank, and what it sends to other experts is theirs to compute.
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
    held: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are projections of one vector.

    That vector, the compressed latent, and one key that all heads share are what is cached of a token. A head's
    queries and keys have two parts: one without positions, whose keys are projected from the latent, and a rotated
    one, whose key is the shared one.

    Queries can be multiplied by the projection of keys instead of the keys, and what is read of the latents by the
    projection of values. So computed, attention has a single key head as wide as what is cached, whose values are
    its keys. A DecoderConfig with latent attention describes that one: num_kv_heads is 1, head_dim is
    `kv_rank + rope_head_dim`, and attention_scale is given.

    Attributes:
        query_rank: Width of what queries are projected from; None: from hidden states.
        kv_rank: Width of the compressed latent.
        nope_head_dim: Width of a head's part without positions.
        rope_head_dim: Width of its rotated part, and of the shared key.
        value_head_dim: Width of a head's values.
        interleaved: Whether dimensions 2i and 2i + 1 are rotated together, instead of i and i + rope_head_dim / 2.
        norm_eps: Of the norms on what queries are projected from and on the compressed latent.
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
        """Width of a query head, both parts."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached_dim(self) -> int:
        """How many numbers of a token each layer caches."""
        return self.kv_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture of a decoder: all that its forward pass depends on beside weights.

    Attributes:
        vocab_size: Token ids, rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides num_heads.
        head_dim: Width of one head; num_heads * head_dim need not be hidden_size.
        intermediate_size: Width inside the MLP.
        max_positions: Longest sequence in tokens: rows of learned positions, or how far rotary ones reach.
        norm: RMSNorm (weight) or LayerNorm (weight and bias).
        norm_eps: Added to the variance.
        activation: Inside the MLP; gelu_tanh is the tanh approximation.
        gated_mlp: down(act(gate(x)) * up(x)) instead of down(act(up(x))).
        clamped_swiglu: What gated MLPs, and experts, compute instead of act(gate) * up; None: they compute that.
        ropes: Per layer its rotary positions; None: it has none.
        qkv_bias: Biases on the query, key and value projections.
        output_bias: Bias on the attention's output projection.
        mlp_bias: Biases in the MLP.
        qk_norm: RMSNorm over queries and keys before the rotation: over each head, or over all heads together.
            None: there is none.
        sliding_windows: Per layer, how many keys a token sees, itself included; None: all before it.
        tied_embeddings: The output projection is the embedding, unless the checkpoint has another.
        learned_positions: An embedding of each position is added to the input.
        position_offset: Rows of that embedding before position 0's.
        norm_placement: Where a layer's norms are: on what attention and MLP read, on what they give before it is
            added to the residual stream, or both.
        norm_offset: What is added to the weights of norms as they are stored.
        parallel_residual: Attention and MLP read the same input, each through its own norm, and both are added.
        attention_scale: Multiplies queries times keys; None: head_dim ** -0.5.
        learned_sinks: Each query head has a learned score, one more term of its softmax's sum without a value:
            what a token reads weighs less than 1 in all.
        attention_soft_cap: Scores become cap * tanh(score / cap); None: they stay.
        logits_soft_cap: The same for logits.
        embedding_scale: Multiplies the embeddings of tokens.
        residual_scale: Multiplies what attention and MLP add to the residual stream.
        logits_scale: Multiplies the logits.
        experts: What some layers have instead of an MLP; None: none has.
        num_draft_layers: How many more layers a checkpoint may have, which guess further tokens and are not read.
        latent: How keys and values are compressed, and what num_kv_heads and head_dim then mean; None: they are
            not.
        eos_token_ids: Ids that end a sequence, of generation_config.json, else config.json.
        dtype: The checkpoint's: float32, bfloat16 or float16; None if config.json does not say.
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
    qk_norm: QkNorm | None = None
    learned_positions: bool = False
    position_offset: int = 0
    norm_placement: NormPlacement = "before"
    norm_offset: float = 0.0
    parallel_residual: bool = False
    attention_scale: float | None = None
    learned_sinks: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    clamped_swiglu: ClampedSwiglu | None = None
    experts: ExpertsConfig | None = None
    num_draft_layers: int = 0
    latent: LatentAttention | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def dense_width(self) -> int:
        """Width inside the MLP of layers without experts; 0 if every layer has experts."""
        return 0 if self.experts is not None and all(self.experts.layers) else self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of the MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def score_scale(self) -> float:
        """The factor of the attention scores: queries times keys are multiplied by it."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_size(self) -> int:
        """How many numbers of a token each layer caches: keys and values, once where both are the same."""
        return 2 * self.kv_size if self.latent is None else self.kv_size

    @property
    def rotary_head_dim(self) -> int:
        """Width of what is rotated, if not in part: a head, or of latent attention its part with positions."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def output_head_dim(self) -> int:
        """Width of what a head gives to the output projection."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim
