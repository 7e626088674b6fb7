"""One description of a decoder-only transformer for all families: plain numbers and names, no tensors.

Every family's config.json is translated into a `DecoderConfig` once, at load; nothing behind it asks which family
a model belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


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
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions over the whole head: base `theta` and how long contexts are reached, if at all."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the forward pass depends on.

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
        rope: Rotary positions; None: a learned embedding is added to the input.
        qkv_bias: Biases on the query, key and value projections.
        output_bias: Bias on the attention's output projection.
        mlp_bias: Biases in the MLP.
        qk_norm: RMSNorm over each query and key head, before the rotation.
        sliding_windows: Per layer, how many keys a token sees, itself included; None: all before it.
        tied_embeddings: The output projection is the embedding, unless the checkpoint has another.
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
    rope: RopeConfig | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.num_kv_heads * self.head_dim
