"""Components of layers that only torch's operators compute; other engines refuse a model that needs one."""

from __future__ import annotations

from inflight.models import DecoderConfig
from inflight.models.rope_config import ProportionalScaling


def only_by_torch(decoder: DecoderConfig) -> dict[str, bool]:
    """Return the components that only torch's operators compute: {description: whether the model needs it}."""
    experts, layers = decoder.experts, range(decoder.num_layers)
    return {
        "heads or MLPs that differ from layer to layer": bool(decoder.layer_sizes),
        "keys that are also values": any(decoder.keys_are_values),
        "norms of values": decoder.value_norm,
        "layers that read another layer's keys and values": not all(
            map(decoder.has_own_kv, range(decoder.num_layers))
        ),
        "proportional rotary positions": any(
            rope is not None and isinstance(rope.scaling, ProportionalScaling) for rope in decoder.ropes
        ),
        "a learned factor of each layer's output": decoder.layer_scales,
        "per-layer embeddings": decoder.layer_inputs is not None,
        "experts with norms or factors of their own": experts is not None
        and (experts.has_norms or experts.has_expert_scales),
        "experts with weighted inputs": experts is not None and experts.weighs_inputs,
        "attention in chunks": any(decoder.attention_chunks),
        "ALiBi": decoder.alibi is not None,
        "a norm on embeddings": decoder.embedding_norm,
        "norms without weights": decoder.qk_norm == "unweighted",
        "attention beside recurrent layers": any(map(decoder.has_state, layers))
        and not all(map(decoder.is_recurrent, filter(decoder.has_state, layers))),
        "layers without attention or without an MLP": not all(map(decoder.has_mlp, layers))
        or not all(decoder.has_attention(layer) or decoder.has_state(layer) for layer in layers),
        "fixed factors of activations": decoder.multipliers is not None,
        "another activation in recurrent layers": decoder.recurrent_activation
        not in (None, decoder.activation),
        "experts without gates": experts is not None and not decoder.gated_mlp,
        "experts of projected hidden states": experts is not None and experts.latent_size > 0,
        "xIELU": decoder.activation == "xielu",
        "gates of heads": decoder.head_gates,
        "several residual streams (AltUp)": decoder.altup is not None,
        "low-rank branches beside attention (LAuReL)": decoder.laurel_rank > 0,
        "sparse gates of MLPs": any(decoder.gate_sparsity),
    }
