from __future__ import annotations

from pathlib import Path

import pytest

from inflight.engine.cpu import library
from tests.engine.cpu import emulation
from tests.engine.cpu.targets import OWN


@pytest.fixture(scope="session")
def emulated_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulation.build_program(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The target for which layers are compiled, one of targets.py."""
    name = request.param
    if name != OWN:  # one library per dtype with all features, so that few are built
        command = library._compiler_command
        monkeypatch.setattr(
            library,
            "_compiler_command",
            lambda flags, dtype, *_: command(flags, dtype, int8=dtype == "bfloat16", rounded_cache=True),
        )
    if name in emulation.TARGETS:
        emulation.emulate(name, request.getfixturevalue("emulated_program"), monkeypatch)
    elif name != OWN:
        monkeypatch.setenv("INFLIGHT_CPU_TARGET", name)
    return name
