"""The memory of the host and the devices that this process holds, as its kernel and torch count it.

And that a process gives back what it needs no more. Asks torch only where something else has imported it and CUDA
is in use: a process without an engine pays nothing. Any thread.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import psutil

from inflight.core.report.stats import MemoryUsage

_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have the C library give memory of large blocks back to the kernel as soon as they are freed.

    It does so at first, and for larger and larger blocks alone as they come and go: what a large body has taken
    would stay. Other C libraries than GNU's have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def return_free_memory() -> None:
    """Have the C library give all free memory back to the kernel, small blocks too; takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure_memory() -> MemoryUsage:
    """Resident memory, and what torch has reserved on devices and pinned on the host."""
    gpu, pinned = _torch_memory(sys.modules.get("torch"))
    return MemoryUsage(psutil.Process().memory_info().rss, gpu, pinned)


def _torch_memory(torch: Any) -> tuple[int, int]:
    """(device bytes, pinned bytes) of a torch module, or of None."""
    cuda = getattr(torch, "cuda", None)  # absent while another thread is still importing torch
    if cuda is None or not cuda.is_initialized():
        return 0, 0
    reserved = sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))
    host_memory_stats = getattr(cuda, "host_memory_stats", None)  # not in every torch
    return reserved, host_memory_stats().get("allocated_bytes.current", 0) if host_memory_stats else 0
