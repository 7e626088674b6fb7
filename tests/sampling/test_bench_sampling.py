"""The benchmark runs every feature that it names."""

from __future__ import annotations

import pytest

from benchmarks.sampling import FEATURES, Shape, run


def test_every_feature_has_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(Shape(rows=12, vocab_size=300, history=8), FEATURES, flat=False, repeats=1)
    assert [row["feature"] for row in figures] == [feature.name for feature in FEATURES]
    printed = capsys.readouterr().out
    assert all(feature.name in printed for feature in FEATURES)
