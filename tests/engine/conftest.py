from __future__ import annotations

import pytest

from tests.engine.kernels import DEFAULT, TORCH
from tests.models.conftest import zoo  # noqa: F401 - one fixture for both folders


@pytest.fixture(params=[DEFAULT, TORCH])
def kernels(request: pytest.FixtureRequest) -> str | None:
    """Kernels of an engine: this machine's default, and torch's operators."""
    return request.param
