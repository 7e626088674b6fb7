"""The torch engine: one packed forward pass over a paged KV cache, on a CPU or an NVIDIA GPU.

Owns device memory. Knows neither requests nor queues: it is told what to run by ScheduledBatch values, on one
thread, the loop's.
"""

from inflight.engine.torch.config import TorchEngineConfig
from inflight.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine", "TorchEngineConfig"]
