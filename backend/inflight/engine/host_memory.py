"""Large host allocations in huge pages, if the kernel supports them, for fewer page faults and TLB misses.

Memory that is not written yet takes no physical memory. An `Arena` or a `Recycled` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line
_REGION = 64 << 20  # bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros with its own memory."""
    count = torch.Size(shape).numel()
    return _map(max(1, count * dtype.itemsize))[: count * dtype.itemsize].view(dtype).view(shape)


class Arena:
    """Allocates tensors side by side in a few regions, for tensors too small for huge pages of their own.

    Args:
        map_region: Returns a uint8 tensor of at least the given number of bytes; None: anonymous memory is mapped,
            64 MiB or more at a time.
    """

    def __init__(self, map_region: Callable[[int], Tensor] | None = None) -> None:
        self._map_region = map_region or _map_region
        self._region = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return [count] elements, aligned to 64 bytes. The region lives as long as any of its tensors."""
        size = count * dtype.itemsize
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > len(self._region):
            self._region = self._map_region(padded)
        found, self._region = self._region[:size], self._region[padded:]
        return found.view(dtype)


class Recycled:
    """Allocates tensors in the memory of freed ones, as newly mapped memory costs a page fault per page."""

    def __init__(self) -> None:
        self._memories: list[mmap.mmap] = []
        unreferenced = [object()]
        self._unused = sys.getrefcount(unreferenced[0])

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor like torch.empty, in memory to which no tensor or view refers any more."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = count * dtype.itemsize
        memories = self._memories
        unused = [index for index in range(len(memories)) if sys.getrefcount(memories[index]) == self._unused]
        found = next((index for index in unused if len(memories[index]) >= size), None)
        if found is None:
            for index in reversed(unused):
                del memories[index]
            found = len(memories)
            memories.append(_map_memory(1 << max(size, 1).bit_length()))
        return torch.frombuffer(memories[found], dtype=dtype, count=count).view(shape)


def _map_region(size: int) -> Tensor:
    return _map(max(size, _REGION))


def _map(size: int) -> Tensor:
    return torch.frombuffer(_map_memory(size), dtype=torch.uint8)


def _map_memory(size: int) -> mmap.mmap:
    # Private, as shared memory has small pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # not supported by this kernel
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
