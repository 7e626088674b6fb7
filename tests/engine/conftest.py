from __future__ import annotations

import pytest

from inflight.engine import draft_costs
from tests.engine.kernels import DEFAULT, TORCH
from tests.models.conftest import zoo  # noqa: F401 - one fixture for both folders


@pytest.fixture(params=[DEFAULT, TORCH])
def kernels(request: pytest.FixtureRequest) -> str | None:
    """Kernels of an engine: this machine's default, and torch's operators."""
    return request.param


@pytest.fixture
def cheap_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate the time of a draft head by its products alone: with its other operations, the head of a tiny model
    takes too long to be used."""
    monkeypatch.setitem(draft_costs._OVERHEAD_BYTES, "cpu", 0.0)
