from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tensorrt import engines
from tests.models.conftest import zoo  # noqa: F401 - one fixture for all folders
from tests.models.zoo import ZooModel

Plans = Callable[..., Path]
"""Takes a model and options of the build; returns the folder of its plans, which are built once."""


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    made: dict[tuple[Path, str], Path] = {}

    def of(model: ZooModel, **options: Any) -> Path:
        key = model.folder, repr(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("plans")
            made[key] = engines.build(model.folder, folder, **options)
        return made[key]

    return of
