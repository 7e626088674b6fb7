"""The operations of recurrent layers for which there are kernels."""

from __future__ import annotations

from typing import NamedTuple

from inflight.engine.recurrent.linear_attention import Attend, scan, step
from inflight.engine.recurrent.short_convolution import Convolve, convolve


class RecurrentOperations(NamedTuple):
    """Linear attention of generation rows and of chunks, and the short convolution; by default in torch's
    operators."""

    step: Attend = step
    scan: Attend = scan
    convolve: Convolve = convolve


BY_TORCH = RecurrentOperations()
