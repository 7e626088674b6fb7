from __future__ import annotations

import pytest
import torch

from tests.models.zoo import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.set_num_threads(1)  # models this small only wait for each other on more
    return Zoo(tmp_path_factory.mktemp("zoo"))
