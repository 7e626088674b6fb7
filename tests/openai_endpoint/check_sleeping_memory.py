"""A sleeping process has neither weights nor KV cache. Run by test_sleep.py, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from inflight.core.request.sleep import SleepAction
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, demo_engine

_CACHE_TOKENS = 1 << 17


def _mapped_bytes() -> int:
    return psutil.Process().memory_info().vms


def _token_bytes() -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config = json.loads((DEMO / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4


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
            # Half of the cache leaves room for what threads map meanwhile.
            assert awake - _mapped_bytes() > limits.num_blocks * limits.tokens_per_block * _token_bytes() / 2
            assert not client.sleep(SleepAction.WAKE_UP, PATIENCE_S)
            assert _maps_weights() == (weights == "mmap")
