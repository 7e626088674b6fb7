"""The causal convolution of recurrent layers, over the inputs of the last few tokens, in torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Convolve: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]"
"""The type of `convolve`."""


def convolve(inputs: Tensor, states: Tensor, weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve the next tokens of each sequence, computed in float32.

    Args:
        inputs: [sequences, tokens, columns].
        states: Inputs of the last tokens before these, [sequences, width - 1, columns].
        weights: [columns, width] float32; the last one is for the present token.
        bias: [columns] float32; None: there is none.

    Returns:
        Outputs like `inputs`, and the states after these tokens.
    """
    num_tokens = inputs.shape[1]
    known = torch.cat((states, inputs), dim=1)
    if num_tokens == 1:
        outputs = (known.float() * weights.T).sum(1, keepdim=True)
        outputs = outputs if bias is None else outputs + bias
    else:
        columns = known.mT.float().contiguous()
        outputs = F.conv1d(columns, weights.unsqueeze(1), bias, groups=len(weights)).mT
    return outputs.to(inputs.dtype), known[:, num_tokens:]
