"""Measure this process's memory on host and devices, and return free memory to the kernel.

Reads torch's statistics only if another module has imported torch and CUDA is in use, so that a process
without an engine does not import torch. Any thread.
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
    """Make the C library return memory of large blocks to the kernel as soon as they are freed.

    By default the C library raises its size limit for such blocks when one is freed, so that it would keep
    the memory of large request bodies. Only GNU's C library has this setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def return_free_memory() -> None:
    """Return all free memory of the C library to the kernel, including small blocks. Takes a few milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure_memory() -> MemoryUsage:
    """Return this process's resident memory, and torch's device memory and pinned host memory, in bytes."""
    gpu, pinned = _torch_memory(sys.modules.get("torch"))
    return MemoryUsage(psutil.Process().memory_info().rss, gpu, pinned)


def _torch_memory(torch: Any) -> tuple[int, int]:
    """Return (device bytes, pinned bytes) from the module `torch`; zeros if it is None."""
    cuda = getattr(torch, "cuda", None)  # missing while another thread is still importing torch
    if cuda is None or not cuda.is_initialized():
        return 0, 0
    reserved = sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))
    host_memory_stats = getattr(cuda, "host_memory_stats", None)  # missing in some versions of torch
    return reserved, host_memory_stats().get("allocated_bytes.current", 0) if host_memory_stats else 0
