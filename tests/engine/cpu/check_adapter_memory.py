"""An adapter for which there is too little memory. Run by test_native_adapters.py, in a process of its own."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.structs import AdapterStruct
from inflight.errors import StepFailed
from tests.engine.driver import Driver, load_engine
from tests.engine.merged import make_adapter
from tests.models.zoo import Zoo

_HUGE_RANK_ADAPTER = AdapterStruct()
_HUGE_RANK_ADAPTER.ranks = 2**31 - 4
_LIMIT_BYTES = 4 << 30  # some kernels promise any amount of memory


def _addresses_of_huge_rank_adapter(first_pages: Any) -> Any:
    return np.full(len(first_pages), ctypes.addressof(_HUGE_RANK_ADAPTER), dtype=np.uint64)


def test_a_lack_of_memory_for_adapters_fails_the_iteration(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, dtype="float32", kernels="native", max_num_sequences=20)
    assert isinstance(engine.runner.decoder, NativeDecoder)
    monkeypatch.setattr(engine.runner.decoder._adapters, "addresses", _addresses_of_huge_rank_adapter)
    driver = Driver(engine)
    row = driver.start(model.prompt(20), adapter=driver.put(make_adapter(model).stored, (0, 7)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with pytest.raises(StepFailed, match=r"MemoryError: .*intermediate results"):
        driver.generate(row, 1)
