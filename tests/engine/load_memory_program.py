"""Loads models one after the other and prints the memory that each load took: see test_load_memory.py."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from inflight.config import EngineConfig
from inflight.engine.collectives import ALONE
from inflight.engine.load_decoder import load_decoder
from inflight.models import read_model_description
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping

_M_MMAP_THRESHOLD = -3


def _load(folder: str, dtype: str | None, kernels: str | None, tp_size: int) -> object:
    config = EngineConfig(folder, dtype=dtype, device="cpu", kernels=kernels, tokens_per_block=8)
    model = read_model_description(folder)
    part = Part.from_mapping(Mapping(tp_size), model.decoder)
    windows = (None,) * model.decoder.num_layers
    return load_decoder(config, model, torch.device("cpu"), part, windows, 64, ALONE)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _resident() -> int:
    """Return the resident bytes, after the allocator has returned free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _measure(small: str, folder: str, dtype: str | None, kernels: str | None, tp_size: int) -> dict[str, int]:
    _load(small, dtype, kernels, tp_size)  # memory that only the first load of its kind takes
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the maximum
    loaded = _load(folder, dtype, kernels, tp_size)
    found = {"peak": _status("VmHWM") - before, "kept": _resident() - before}
    del loaded
    return found


def main() -> None:
    """Measure loads; the argument lists small checkpoint, checkpoint to measure, dtype, kernels, and ranks."""
    torch.set_num_threads(2)
    # Give large tensors their own pages: glibc would keep the memory of some freed ones.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    print(json.dumps([_measure(*case) for case in json.loads(sys.argv[1])]))


main()
