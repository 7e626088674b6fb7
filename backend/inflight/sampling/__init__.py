"""Sampling: logits to tokens. Owns the random numbers; knows neither blocks nor the forward pass.

`pipeline.py` states the order of the steps. `reference.py` is a slow and obvious version, against which the fast
code is tested. Called by the engine, on the loop thread.
"""

from inflight.sampling.logits_post_processors import LogitsPostProcessors
from inflight.sampling.sampler import Choice, Sampler

__all__ = ["Choice", "Sampler", "LogitsPostProcessors"]
