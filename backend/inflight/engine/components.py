"""Components of layers that only torch's operators compute, for the other engines' lists of what they lack."""

from __future__ import annotations

from inflight.models import DecoderConfig
from inflight.models.decoder_config import ProportionalScaling


def only_by_torch(decoder: DecoderConfig) -> dict[str, bool]:
    """Return whether the model needs each of these components."""
    experts = decoder.experts
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
    }
