"""The blocks of a KV cache as bytes, for a block store that saves them outside of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CacheBlocks:
    """Reads and writes whole blocks; implements `inflight.block_store.BlockMemory`.

    Args:
        memories: All tensors of the cache, [layers, parts, blocks, any] each.
    """

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self._memories = [memory.view(torch.uint8) for memory in memories]
        self._sizes = [memory[:, :, 0].numel() for memory in self._memories]
        self.block_bytes = sum(self._sizes)
        self.is_on_host = all(memory.device.type == "cpu" for memory in self._memories)
        # numpy copies on the calling thread; torch would start threads of its own for each thread that copies.
        self._arrays = [memory.numpy() for memory in self._memories] if self.is_on_host else []

    def read(self, block_id: int) -> NDArray[np.uint8]:
        """Return a copy of a block, [block_bytes]."""
        if self._arrays:
            return np.concatenate([array[:, :, block_id].ravel() for array in self._arrays])
        parts = [memory[:, :, block_id].flatten() for memory in self._memories]
        return torch.cat(parts).cpu().numpy()

    def write(self, block_id: int, content: NDArray[np.uint8]) -> None:
        """Overwrite a block with `content` [block_bytes], and return when it is there."""
        start = 0
        for place, size in enumerate(self._sizes):
            part, start = content[start : start + size], start + size
            if self._arrays:
                target = self._arrays[place][:, :, block_id]
                target[...] = part.reshape(target.shape)
            else:
                self._copy_to_gpu(self._memories[place][:, :, block_id], part)

    def _copy_to_gpu(self, target: Tensor, part: NDArray[np.uint8]) -> None:
        """Copy on a stream of its own, beside the kernels of the loop's iterations."""
        stream = torch.cuda.Stream(target.device)
        with torch.cuda.stream(stream):
            target.copy_(torch.from_numpy(part).view(target.shape))
        stream.synchronize()
