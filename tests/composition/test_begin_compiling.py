"""The compiler is started before torch is imported, for what the load is going to ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight import build
from inflight.engine.torch.native import library
from tests.triton.factories import make_parameters

NOTHING: list[tuple[str, bool]] = []


@pytest.mark.parametrize(
    ("given", "config", "begun"),
    [
        ({"dtype": "float32"}, "{}", [("float32", False)]),
        ({"dtype": "int8"}, "{}", [("bfloat16", True)]),
        ({}, json.dumps({"torch_dtype": "bfloat16"}), [("bfloat16", False)]),
        ({}, json.dumps({"dtype": "float32"}), [("float32", False)]),
        ({"kernels": "torch", "dtype": "float32"}, "{}", NOTHING),
        ({}, "{}", NOTHING),
        ({}, "no JSON", NOTHING),
        ({}, "[]", NOTHING),
        ({}, json.dumps({"dtype": 3}), NOTHING),
    ],
)
def test_it_compiles_for_the_dtype_that_will_be_loaded(
    tmp_path: Path,
    given: dict[str, str],
    config: str,
    begun: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU computes with torch's operators")
    (tmp_path / "config.json").write_text(config)
    found: list[tuple[str, bool]] = []
    monkeypatch.setattr(library, "begin_loading", lambda dtype, int8: found.append((dtype, int8)))
    build._begin_compiling(make_parameters(**given).engine, str(tmp_path))
    assert found == begun
