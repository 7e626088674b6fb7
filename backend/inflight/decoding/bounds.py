"""How large a logit gets by what a request asks for: so large that it decides, and small enough to go on with.

A bias may be infinite, and penalties multiply. Were a logit to overflow, differences between two would be no
numbers, and a token that was only made unlikely could not be told from one that is banned.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOGIT = 1e30


def bounded(logits: Tensor, impossible: Tensor) -> Tensor:
    """Within [-1e30, 1e30], and -inf for the tokens that are `impossible` [the same shape, bool]."""
    return logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).masked_fill_(impossible, -torch.inf)
