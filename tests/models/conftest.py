from __future__ import annotations

import pytest
import torch

from tests.models.zoo import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.set_num_threads(1)  # more threads only slow models this small down
    return Zoo(tmp_path_factory.mktemp("zoo"))
