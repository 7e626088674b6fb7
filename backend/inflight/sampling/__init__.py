"""Logits → tokens. Owns sampling and its random numbers; knows neither blocks nor the forward pass.

`pipeline.py` says what happens in which order; `reference.py` says the same slowly and obviously, and is what the
fast code is tested against. Called by the engine, on the loop thread.
"""

from inflight.sampling.logits_post_processors import LogitsPostProcessors
from inflight.sampling.sampler import Choice, Sampler

__all__ = ["Choice", "Sampler", "LogitsPostProcessors"]
