"""What the composition root does before and after a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight import build
from inflight.build import build_engine
from inflight.engine.torch.native import library
from inflight.errors import ConfigError
from inflight.testing.fake_server import load_fake
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


def build_with_end_ids(end_ids: str, folder: Path) -> bool:
    """Build an engine with 100 token ids; whether it could be closed."""
    parameters = make_parameters(gpt_model_path="vocab=100", default_end_ids=end_ids)
    return build_engine(parameters, "", str(folder / "engine.sock"), load=load_fake).close()


def test_the_last_id_of_the_vocabulary_is_an_end_id(tmp_path: Path) -> None:
    assert build_with_end_ids("0,99", tmp_path)


def test_an_id_outside_the_vocabulary_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default_end_ids has 100, expected token ids in \[0, 99\]"):
        build_with_end_ids("2,100", tmp_path)
