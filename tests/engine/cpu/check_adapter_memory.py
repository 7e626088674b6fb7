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

_ENDLESS = AdapterStruct()
_ENDLESS.ranks = 2**31 - 4
_ROOM_BYTES = 4 << 30  # some kernels promise any amount of memory


def _of_an_adapter_of_endless_ranks(first_pages: Any) -> Any:
    return np.full(len(first_pages), ctypes.addressof(_ENDLESS), dtype=np.uint64)


def test_no_memory_for_the_deltas_of_adapters(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, dtype="float32", kernels="native", max_num_sequences=20)
    assert isinstance(engine.runner.decoder, NativeDecoder)
    monkeypatch.setattr(engine.runner.decoder._adapters, "addresses", _of_an_adapter_of_endless_ranks)
    driver = Driver(engine)
    row = driver.start(model.prompt(20), adapter=driver.put(make_adapter(model).stored, (0, 7)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with pytest.raises(StepFailed, match=r"MemoryError: .*intermediate results"):
        driver.generate(row, 1)
