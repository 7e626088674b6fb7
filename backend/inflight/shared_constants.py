"""Constants that torch's operators, the compiled layers and the kernels in Triton's language share.

With the same constants they compute the same results. Standard library only, as compiled code is loaded without
torch.
"""

from __future__ import annotations

MIN_SCALE = 1e-30
"""The least scale by which values are divided when they are rounded to 8 bits, as all of them may be 0."""

LARGEST_LOGIT = 1e30
"""Limit of the magnitude of logits that a bias or a penalty changed."""

PENALTY_NAMES = ("repetition", "presence", "frequency")
"""The float64 fields of a row's penalties."""

NUM_LIMITS = 4
"""Number of float64 fields of the limits of a row's tokens (`LIMITS` in sampling/top_k_top_p.py)."""

FEW_CANDIDATES = 128
"""Number of most likely tokens that are tried before a top-p is sought in the whole vocabulary."""

WEIGHTS_PER_BLOCK = 64
"""Weights over a vocabulary are added up in float32 within blocks of this size, and in float64 across blocks."""

LOW_DIGIT_BITS = 10
"""A float32's bits are divided into three digits: the lower two have this many bits, the highest has the rest."""
