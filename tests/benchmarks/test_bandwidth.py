"""The process that measures the memory bandwidth."""

from __future__ import annotations

import pytest

from benchmarks.measuring.bandwidth import Probe


@pytest.mark.smoke
def test_a_probe_can_be_used_several_times_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Probe(1) as probe:
        assert probe.gb_per_s() > 0
        assert probe.gb_per_s() > 0
