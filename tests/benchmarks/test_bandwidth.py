"""The process that says how fast memory is read."""

from __future__ import annotations

import pytest

from benchmarks.measuring.bandwidth import Probe


@pytest.mark.smoke
def test_a_probe_answers_as_often_as_it_is_asked():
    with Probe(1) as probe:
        assert probe.gb_per_s() > 0
        assert probe.gb_per_s() > 0
