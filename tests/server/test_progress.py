"""Progress while weights are read and layers are compiled: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from inflight import progress
from inflight.progress import BAR_VARIABLE, ProgressEcho, compile_progress, load_progress, pause_s

RECORD = 'I1122 12:00:00.000001 1 log.py:24] "{}"\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "inflight.progress")
    return caplog


def test_a_load_logs_its_progress(clock: list[float], log: pytest.LogCaptureFixture):
    with load_progress("Loading big", 4_000_000_000) as advance:
        for _ in range(8):
            clock[0] += 0.5
            advance(500_000_000)
    assert [record.message for record in log.records] == [
        "Loading big: 1.00 of 4.00 GB",
        "Loading big: 2.00 of 4.00 GB",
        "Loading big: 4.00 of 4.00 GB",
        "Loading big: 4.00 GB in 4.0 s",
    ]


def test_a_short_load_logs_nothing(clock: list[float], log: pytest.LogCaptureFixture):
    with load_progress("Loading small", 100) as advance:
        clock[0] += 0.9
        advance(100)
    assert not log.records


def test_a_failed_load_does_not_log_completion(clock: list[float], log: pytest.LogCaptureFixture):
    with pytest.raises(OSError), load_progress("Loading bad", 100):
        clock[0] += 9
        raise OSError
    assert not log.records


def test_a_long_step_logs_few_lines_but_moves_a_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(BAR_VARIABLE, raising=False)
    assert [pause_s(elapsed) for elapsed in (0, 10, 30, 600)] == [1, 10, 30, 120]
    monkeypatch.setenv(BAR_VARIABLE, "1")
    assert [pause_s(elapsed) for elapsed in (0, 10, 30, 600)] == [1, 1, 3, 5]


def test_a_build_logs_its_subject_and_its_duration(clock: list[float], log: pytest.LogCaptureFixture):
    with compile_progress("bfloat16") as tick:
        for _ in range(12):
            clock[0] += 1
            tick()
    assert [record.message for record in log.records] == [
        "compiling the decoder's layers (bfloat16), once on this machine",
        "compiling the decoder's layers (bfloat16), once on this machine: 5 s so far",
        "compiling the decoder's layers (bfloat16), once on this machine: 10 s so far",
        "the decoder's layers (bfloat16): the compiler took 12.0 s",
    ]


def test_on_a_terminal_progress_is_a_bar_and_not_logged(
    clock: list[float], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with load_progress("Loading big", 100) as advance:
        clock[0] += 2
        advance(50)
    assert "Loading big" in terminal.getvalue() and not log.records
    with compile_progress("int8") as tick:
        tick()
    assert "compiling the decoder's layers (int8)" in terminal.getvalue()


def test_a_failing_display_does_not_end_the_load(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    def broken(stream: object) -> object:
        raise RuntimeError("only one live display may be active at once")

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_make_bar", broken)
    with load_progress("Loading big", 100) as advance:
        clock[0] += 2
        advance(50)
        advance(50)


def test_progress_lines_of_a_server_become_a_bar():
    terminal = Terminal()
    echo = ProgressEcho(terminal)
    echo.write(RECORD.format("before"))
    assert terminal.getvalue() == RECORD.format("before")
    echo.write(RECORD.format("compiling the decoder's layers (bfloat16), once on this machine"))
    echo.write(RECORD.format("the decoder's layers (bfloat16): the compiler took 9.1 s"))
    assert not echo._bar.is_shown
    echo.write(RECORD.format("Loading llama: 0.50 of 2.00 GB"))
    echo.write(RECORD.format("meanwhile [bold]"))
    echo.write("rank 1: INFO Loading llama: 1.00 of 2.00 GB\n")
    echo.write(RECORD.format("Loading llama: 2.00 GB in 4.1 s"))
    assert echo._bar.is_shown, "rank 1 is still loading"
    echo.write("rank 1: INFO Loading llama: 2.00 GB in 4.1 s\n")
    assert not echo._bar.is_shown
    echo.write(RECORD.format("after"))
    text = terminal.getvalue()
    assert "meanwhile [bold]" in text and text.endswith(RECORD.format("after"))
    assert "0.50 of 2.00 GB" not in text and "0.5/2.0 GB" in text
    assert "Loading llama: 2.00 GB in 4.1 s" in text, "what it took stays in the log"


def test_a_line_written_in_parts_stays_one_line():
    terminal = Terminal()
    echo = ProgressEcho(terminal)
    echo.write(RECORD.format("Loading llama: 0.50 of 2.00 GB"))
    print("serve: not ready yet", file=echo)
    echo.write("the ")
    echo.close()
    assert "serve: not ready yet\n" in terminal.getvalue() and terminal.getvalue().endswith("the ")


def test_the_bar_is_removed_if_a_load_does_not_end():
    terminal = Terminal()
    echo = ProgressEcho(terminal)
    echo.write(RECORD.format("Loading llama: 0.50 of 2.00 GB"))
    echo.close()
    assert not echo._bar.is_shown


def test_serve_shows_bars_on_a_terminal_and_lines_elsewhere(counting_repository: Path):
    """The real command runs a model that reports progress, on a pseudo-terminal and on a pipe."""
    model = counting_repository / "tensorrt_llm" / "1" / "model.py"
    line = "Loading counter: 1.00 of 2.00 GB"
    said = f'print("{line}", flush=True); import time; time.sleep(0.6); raise ValueError("enough")'
    model.write_text(model.read_text().replace('print("serving"', f'{said}\n        print("serving"'))
    command = [sys.executable, "-m", "inflight.server", "--model-repository", str(counting_repository)]
    command += [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert line in piped.stderr and "enough" in piped.stderr and "\x1b" not in piped.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 1
    assert b"1.0/2.0 GB" in text and line.encode() not in text and b"enough" in text
