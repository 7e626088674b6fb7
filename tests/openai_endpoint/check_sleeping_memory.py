"""A sleeping process has neither weights nor KV cache. Run by test_sleep.py, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from inflight.core.request.sleep import SleepAction
from tests.openai_endpoint.serving import PATIENCE_S, demo_engine

_CACHE_TOKENS = 1 << 17


def _mapped_bytes() -> int:
    return psutil.Process().memory_info().vms


def _maps_weights() -> bool:
    return ".weights" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("weights", ["memory", "mmap"])
def test_the_system_has_the_memory_back(
    weights: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with demo_engine(
        weights=weights,
        enable_sleep_mode="true",
        max_batch_size="64",
        max_tokens_in_paged_kv_cache=str(_CACHE_TOKENS),
    ) as client:
        limits = client.describe().limits
        awake = _mapped_bytes()
        assert _maps_weights() == (weights == "mmap")
        for _ in range(2):
            assert client.sleep(SleepAction.SLEEP, PATIENCE_S)
            assert not _maps_weights()
            # At least two tensors of one float32 for each cached token of each layer.
            assert awake - _mapped_bytes() > limits.num_blocks * limits.tokens_per_block * 8
            assert not client.sleep(SleepAction.WAKE_UP, PATIENCE_S)
            assert _maps_weights() == (weights == "mmap")
