"""The blocks of a KV cache, and snapshots of recurrent state, as bytes, for a block store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Entries:
    """Reads and writes the entries of tensors that belong together.

    Args:
        memories: The tensors; an entry is `memory[..., index, :]` of each, where `dimension` has the indices.
        dimension: The dimension of the indices.
        first: Index of entry 0.

    Attributes:
        num_bytes: Bytes of an entry.
    """

    def __init__(self, memories: Sequence[Tensor] = (), dimension: int = 0, first: int = 0) -> None:
        self._first = first
        self._memories = [memory.movedim(dimension, 0) for memory in memories]
        self._sizes = [memory[0].numel() * memory.element_size() for memory in self._memories]
        self.num_bytes = sum(self._sizes)
        # numpy copies on the calling thread; torch would start threads of its own for each thread that copies.
        self._arrays: list[NDArray[np.uint8]] = []
        if all(memory.device.type == "cpu" for memory in memories):
            self._arrays = [_as_array(_as_bytes(memory).movedim(dimension, 0)) for memory in memories]

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return a copy of an entry, [num_bytes]."""
        place = self._first + index
        if not self._memories:
            return np.empty(0, dtype=np.uint8)
        if self._arrays:
            return np.concatenate([array[place].ravel() for array in self._arrays])
        parts = [_as_bytes(memory[place].contiguous()).flatten() for memory in self._memories]
        return _as_array(torch.cat(parts).cpu())

    def write(self, index: int, content: NDArray[np.uint8]) -> None:
        """Overwrite an entry with `content` [num_bytes], and return when it is there."""
        place, start = self._first + index, 0
        for number, (memory, size) in enumerate(zip(self._memories, self._sizes)):
            part, start = content[start : start + size], start + size
            if self._arrays:
                target = self._arrays[number][place]
                target[...] = part.reshape(target.shape)
            else:
                _copy_to_gpu(memory[place], part)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as bytes; its last dimension must be contiguous."""
    return tensor.view(torch.uint8)


def _as_array(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a view of a tensor of bytes in host memory."""
    return tensor.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  no array types


def _copy_to_gpu(target: Tensor, content: NDArray[np.uint8]) -> None:
    """Copy on a stream of its own, beside the kernels of later iterations.

    Kernels that were launched before may still write to the block, for a sequence that has ended.
    """
    stream = torch.cuda.Stream(target.device)
    stream.wait_stream(torch.cuda.default_stream(target.device))
    with torch.cuda.stream(stream):
        source: Tensor = torch.from_numpy(content)  # pyright: ignore[reportUnknownMemberType]  no array types
        target.copy_(source.view(target.dtype).view(target.shape))
    stream.synchronize()


class CacheBytes:
    """A cache's blocks and snapshots as bytes; implements `inflight.block_store.BlockMemory`.

    Args:
        blocks: The blocks.
        snapshots: The snapshots; None without recurrent layers.
        is_on_host: Whether the cache is in host memory.
    """

    def __init__(self, blocks: Entries, snapshots: Entries | None, is_on_host: bool) -> None:
        self._blocks, self._snapshots = blocks, snapshots or Entries()
        self.block_bytes, self.state_bytes = blocks.num_bytes, self._snapshots.num_bytes
        self.is_on_host = is_on_host

    def read(self, index: int, is_state: bool) -> NDArray[np.uint8]:
        return (self._snapshots if is_state else self._blocks).read(index)

    def write(self, index: int, is_state: bool, content: NDArray[np.uint8]) -> None:
        (self._snapshots if is_state else self._blocks).write(index, content)
