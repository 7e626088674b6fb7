"""Sampling: logits to tokens. Owns the random numbers; independent of KV blocks and the forward pass.

`pipeline.py` documents the order of the steps. `reference.py` is a slow and simple version, with which the fast
code is compared in tests. Called by the engine, on the loop thread.
"""

from inflight.sampling.logits_post_processors import LogitsPostProcessors
from inflight.sampling.sampler import Choice, Sampler

__all__ = ["Choice", "Sampler", "LogitsPostProcessors"]
