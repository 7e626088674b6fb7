"""A build shows its progress: as bars on a terminal, elsewhere as log lines."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from inflight.engine.tensorrt import build_progress as progress
from inflight.engine.tensorrt.module import find_module


class Terminal(io.StringIO):
    """Terminal as wide as the phases need."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    with progress.build_progress(find_module()) as monitor:
        monitor.phase_start("Building", None, 4)
        monitor.phase_start("Optimizing", "Building", 7)
        monitor.phase_start("Timing", "Optimizing", 9)
        assert monitor.step_complete("Building", 1)
        assert monitor.step_complete("Optimizing", 4)
        assert monitor.step_complete("Timing", 0)
        monitor.phase_finish("Timing")
        monitor.phase_finish("Optimizing")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"Building .* 2/4 ", shown)
    assert "  Optimizing" in shown
    assert "Timing" not in shown, "only two levels are shown"


def test_without_a_terminal_the_log_has_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "pause_s", lambda elapsed_s: 0.0)
    with caplog.at_level(logging.INFO), progress.build_progress(find_module()) as monitor:
        monitor.phase_start("Building", None, 4)
        monitor.step_complete("Building", 2)
        monitor.step_complete("another that never began", 2)
        monitor.phase_finish("Building")
    assert [record.getMessage() for record in caplog.records] == ["TensorRT: Building, 3 of 4"]


def test_a_display_that_fails_does_not_end_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise OSError("the terminal is gone")

    monkeypatch.setattr(sys, "stderr", Broken())
    with progress.build_progress(find_module()) as monitor:
        monitor.phase_start("Building", None, 4)
        assert monitor.step_complete("Building", 1)
        monitor.phase_finish("Building")
