"""The operations of a decoder layer between its matrix products and its attention, in torch's operators.

On a GPU, kernels may replace the operators (`kernel_operations.py`); they must give the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.recurrent.operations import BY_TORCH
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import Norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of each row's angles, [rows, 1, rotary_dim] float32."""


class LayerOperations:
    """The operations of one model's layers.

    Args:
        decoder: The decoder, as this rank computes it.

    Attributes:
        decoder: The argument of the same name.
        activation: The model's activation function; it raises ValueError for xIELU, whose parameters differ
            by layer.
        recurrent: The operations of recurrent layers.
    """

    recurrent = BY_TORCH

    def __init__(self, decoder: DecoderConfig) -> None:
        self.decoder = decoder
        self.activation = ACTIVATIONS.get(decoder.activation, _is_by_layer)

    def add_norm(self, x: Tensor, computed: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Add the output of attention or MLP to the residual stream x; return the sum and the sum after `norm`,
        [rows, hidden_size] each."""
        scale = self.decoder.residual_scale
        total = x + computed if scale == 1 else x + computed * scale
        return total, total if norm is None else apply_norm(total, norm, self.decoder.norm_eps)

    def rotation(self, all_cos: Tensor, all_sin: Tensor, positions: Tensor) -> Any:
        """Return the rotation for `heads` of rows at `positions`, from tables [positions, rotary_dim / 2]
        float32."""
        return rotation_of(all_cos, all_sin, positions)

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rotation: Any,
        places: Tensor,
        layer: int,
        cache: KvCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split a product into queries, keys and values [rows, heads, head_dim], rotate them, and store keys and
        values.

        Args:
            qkv: [rows, heads + 2 * kv_heads, head_dim]; kv_heads and head_dim may differ from layer to layer.
            norms: Norms of query heads and key heads, applied before the rotation, or after it with
                `norms_rotated`; None: there are none.
            rotation: The result of `rotation`; None: no rotation.
            places: Places in the cache, see `KvCache.write`.
            layer: The layer, for the cache.
            cache: The KV cache.
        """
        heads = self.decoder.num_heads
        kv_heads = (qkv.shape[1] - heads) // 2
        queries_keys, values = qkv.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
        if self.decoder.value_norm:
            values = F.rms_norm(values, values.shape[-1:], eps=self.decoder.norm_eps)
        is_late = self.decoder.norms_rotated
        if norms is not None and not is_late:
            queries_keys = self._norm_heads(queries_keys, norms)
        if rotation is not None:
            queries_keys = rotate(queries_keys, *rotation)
        if norms is not None and is_late:
            queries_keys = self._norm_heads(queries_keys, norms)
        queries, keys = queries_keys.split_with_sizes((heads, kv_heads), dim=1)
        cache.write(layer, places, keys, values)
        return queries, keys, values

    def _norm_heads(self, queries_keys: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        """Apply the norms of query heads and of key heads to [rows, heads + kv_heads, head_dim]."""
        heads = self.decoder.num_heads
        parts = zip((queries_keys[:, :heads], queries_keys[:, heads:]), norms, strict=True)
        return torch.cat([apply_norm(part, norm, self.decoder.norm_eps) for part, norm in parts], dim=1)

    def activate(self, inner: Tensor, parameters: Tensor | None = None) -> Tensor:
        """Return the input of an MLP's second projection, given the first projection's output `inner`.

        `parameters` [4] are the parameters of the layer's xIELU; None for other activations.
        """
        if parameters is not None:
            return xielu(inner, parameters)
        if not self.decoder.gated_mlp:
            return self.activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        if (swiglu := self.decoder.clamped_swiglu) is not None:
            gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
            return gate.mul(torch.sigmoid(gate * swiglu.alpha)).mul_(up + 1)
        return self.activation(gate).mul_(up)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """Return xIELU (Huang and Schlag, 2024) of x, with parameters [4] alpha_p, alpha_n, beta and eps.

    Softplus makes both alphas positive. In the exponent, x is limited to at most eps, a negative number near 0.
    """
    alpha_p, alpha_n, beta, eps = parameters.unbind()
    positive = F.softplus(alpha_p) * x * x
    negative = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + F.softplus(alpha_n))
    return torch.where(x > 0, positive, negative) + beta * x


def _is_by_layer(x: Tensor) -> Tensor:
    raise ValueError("every layer has an activation of its own")


def rotation_of(all_cos: Tensor, all_sin: Tensor, positions: Tensor) -> Rotation:
    """Return cos and signed sin of rows at `positions`, from tables [positions, rotary_dim / 2] float32."""
    cos, sin = all_cos[positions], all_sin[positions]
    return torch.cat([cos, cos], dim=-1).unsqueeze(1), torch.cat([-sin, sin], dim=-1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + rotary_dim / 2) of the heads [rows, heads, head_dim], computed in float32.

    Dimensions from rotary_dim on stay unchanged.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat([rotate(turned, cos, signed_sin), rest], dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    return torch.addcmul(x * cos, swapped, signed_sin).to(x.dtype)


def apply_norm(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """Apply an RMSNorm or a LayerNorm to the last dimension, in float32 if the norm's weights are."""
    if norm.weight.dtype != x.dtype:
        return apply_norm(x.to(norm.weight.dtype), norm, eps).to(x.dtype)
    if norm.bias is None:
        return F.rms_norm(x, x.shape[-1:], norm.weight, eps)
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)
