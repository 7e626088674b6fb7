"""int8 weights for torch's operators: rounded as the compiled layers round them, and multiplied as bfloat16.

Where no compiled code computes int8, a model that is to have int8 weights is the same model all the same, but no
smaller or faster than in bfloat16. Does not know why that is so. On the thread that loads the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight.engine.torch.native.packing import quantize
from inflight.models import DecoderWeights, Linear

_ROWS_AT_ONCE = 4096  # in float32 meanwhile


def round_to_int8(weights: DecoderWeights) -> DecoderWeights:
    """Every linear layer's matrix rounded to int8 with a scale for each row, the layers' in place.

    Embeddings and norms stay as they are, an embedding that is the output projection's matrix too.
    """
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.up, layer.down):
            _round(linear.weight, linear.weight)
    if weights.lm_head is None:
        return weights
    rounded = torch.empty_like(weights.lm_head.weight)
    _round(weights.lm_head.weight, rounded)
    return replace(weights, lm_head=Linear(rounded, weights.lm_head.bias))


def _round(weight: Tensor, target: Tensor) -> None:
    for rows, result in zip(weight.split(_ROWS_AT_ONCE), target.split(_ROWS_AT_ONCE), strict=True):
        levels, scales = quantize(rows)
        result.copy_(levels * scales[:, None])
