"""The parameter default_end_ids against the vocabulary, which is known once there is an engine."""

from __future__ import annotations

import pytest

from inflight.build import _load_checked
from inflight.errors import ConfigError
from inflight.testing.fake_server import load_fake
from tests.triton.factories import make_parameters


def _load(end_ids: str) -> object:
    parameters = make_parameters(gpt_model_path="vocab=100", default_end_ids=end_ids)
    return _load_checked(load_fake, parameters, "", None)


def test_the_last_id_of_the_vocabulary_is_an_end_id() -> None:
    assert _load("0,99")


def test_an_id_outside_the_vocabulary_fails_the_load() -> None:
    with pytest.raises(ConfigError, match=r"default_end_ids has 100, expected token ids in \[0, 99\]"):
        _load("2,100")
