"""Checks of the composition root on a loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.build import build_engine
from inflight.errors import ConfigError
from inflight.testing.fake_server import load_fake
from tests.triton.factories import make_parameters


def build_with_end_ids(end_ids: str, folder: Path) -> bool:
    """Build an engine with 100 token ids; return whether it could be closed."""
    parameters = make_parameters(gpt_model_path="vocab=100", default_end_ids=end_ids)
    return build_engine(parameters, "", str(folder / "engine.sock"), load=load_fake).close()


def test_the_last_id_of_the_vocabulary_may_be_an_end_id(tmp_path: Path) -> None:
    assert build_with_end_ids("0,99", tmp_path)


def test_an_id_outside_the_vocabulary_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default_end_ids has 100, expected token ids in \[0, 99\]"):
        build_with_end_ids("2,100", tmp_path)
