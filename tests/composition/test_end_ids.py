"""The parameter default_end_ids against the vocabulary, which is known once there is an engine."""

from __future__ import annotations

import pytest

from inflight.composition.models import load
from inflight.errors import ConfigError
from tests.triton.factories import make_parameters


def _load(end_ids: str) -> object:
    return load(make_parameters(fake_engine="vocab=100", default_end_ids=end_ids), "", None)


def test_the_last_id_of_the_vocabulary_is_an_end_id() -> None:
    assert _load("0,99")


def test_an_id_outside_the_vocabulary_fails_the_load() -> None:
    with pytest.raises(ConfigError, match=r"default_end_ids has 100, expected token ids in \[0, 99\]"):
        _load("2,100")
