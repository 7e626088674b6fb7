"""`LayerOperations` by kernels in Triton's language; unsupported operations by torch's operators."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from inflight.engine.cuda.kernels import linear_attention, short_convolution
from inflight.engine.cuda.kernels.layers import ACTIVATIONS, add_norm, gated_activation, rotate_and_write
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.layer_operations import LayerOperations
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import Norm
from inflight.models.recurrent import GatedDelta, KimiDelta, Mamba2

ADD_NORM, HEADS, ACTIVATION = "sum and norm", "rotation and KV cache", "activation"
LINEAR_ATTENTION, SHORT_CONVOLUTION = "linear attention", "short convolution"
PARTS = frozenset({ADD_NORM, HEADS, ACTIVATION, LINEAR_ATTENTION, SHORT_CONVOLUTION})


class KernelLayerOperations(LayerOperations):
    """`LayerOperations` that computes the operations in `parts` by kernels, where the kernels support the model.

    Args:
        decoder: The decoder, as this rank computes it.
        parts: Some of PARTS.

    Attributes:
        parts: The parts that are computed by kernels.
    """

    def __init__(self, decoder: DecoderConfig, parts: Set[str] = PARTS) -> None:
        super().__init__(decoder)
        fitting = {
            ADD_NORM: decoder.residual_scale == 1,
            HEADS: decoder.latent is None
            and not decoder.norms_rotated
            and not decoder.value_norm
            and not decoder.layer_sizes,
            ACTIVATION: decoder.gated_mlp
            and decoder.clamped_swiglu is None
            and decoder.activation in ACTIVATIONS,
            LINEAR_ATTENTION: isinstance(decoder.recurrent, (GatedDelta, KimiDelta, Mamba2)),
            SHORT_CONVOLUTION: decoder.recurrent is not None,
        }
        self.parts = frozenset(part for part in parts if fitting[part])
        if LINEAR_ATTENTION in self.parts:
            # Kimi Delta Attention has a decay for each dimension of keys, which only one of the kernels takes.
            self.recurrent = self.recurrent._replace(step=linear_attention.step)
            if not isinstance(decoder.recurrent, KimiDelta):
                self.recurrent = self.recurrent._replace(scan=linear_attention.scan)
        if SHORT_CONVOLUTION in self.parts:
            self.recurrent = self.recurrent._replace(convolve=short_convolution.convolve)

    def add_norm(self, x: Tensor, computed: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Compute sum and RMSNorm with one kernel; with a LayerNorm or no norm, use torch's operators."""
        if norm is None or norm.bias is not None or ADD_NORM not in self.parts:
            return super().add_norm(x, computed, norm)
        return add_norm(x, computed, norm.weight, self.decoder.norm_eps)

    def rotation(self, all_cos: Tensor, all_sin: Tensor, positions: Tensor) -> Any:
        if HEADS not in self.parts:
            return super().rotation(all_cos, all_sin, positions)
        return all_cos, all_sin, positions

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rotation: Any,
        places: Tensor,
        layer: int,
        cache: KvCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if HEADS not in self.parts:
            return super().heads(qkv, norms, rotation, places, layer, cache)
        heads, kv_heads = self.decoder.num_heads, self.decoder.num_kv_heads
        queries, keys = rotate_and_write(
            qkv,
            heads,
            None if norms is None else (norms[0].weight, norms[1].weight),
            self.decoder.norm_eps,
            rotation,
            places,
            cache.tokens(layer),
            cache.scales(layer),
        )
        return queries, keys, qkv[:, heads + kv_heads :]

    def activate(self, inner: Tensor, parameters: Tensor | None = None) -> Tensor:
        if ACTIVATION not in self.parts:
            return super().activate(inner, parameters)
        return gated_activation(inner, self.decoder.activation)
