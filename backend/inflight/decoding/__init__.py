"""Logits → tokens. Owns sampling and its random numbers; knows neither blocks nor the forward pass.

`reference.py` says the same slowly and obviously, and is what the fast code is tested against. Called by the
engine, on the loop thread.
"""

from inflight.decoding.sampler import sample
from inflight.decoding.sampling_table import SamplingRows, SamplingTable

__all__ = ["SamplingRows", "SamplingTable", "sample"]
