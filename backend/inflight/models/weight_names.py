"""What a family calls its tensors: names only, the shapes follow from the DecoderConfig."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; `.weight` and `.bias` are added where a tensor is looked up.

    Attributes:
        base: Prefix of everything but lm_head; checkpoints of the bare decoder leave it out.
        embedding: Token embedding, below `base`.
        final_norm: Below `base`.
        layers: Prefix of a layer, below `base`; `{}` stands for its index.
        attention_norm: Below the layer, like all that follow.
        qkv: One module for each of query, key and value, or one for all three.
        output: Output projection of the attention.
        mlp_norm: Norm before the MLP.
        up: Gate and up if the MLP is gated, else up; or one module for both.
        down: Second projection of the MLP.
        position_embedding: Learned positions, below `base`; "" if there are none.
        query_norm: Norm over query heads; "" if there is none.
        key_norm: Norm over key heads; "" if there is none.
        transposed: Linear weights are stored [in, out].
        ignored: Suffixes of tensors that some versions save and that no forward pass needs.
    """

    base: str
    embedding: str
    final_norm: str
    layers: str
    attention_norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    position_embedding: str = ""
    query_norm: str = ""
    key_norm: str = ""
    transposed: bool = False
    ignored: tuple[str, ...] = ()
