"""Ctrl-C while a server starts."""

import contextlib
import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight import interrupts


def test_an_interrupt_is_noted_although_a_callback_of_the_garbage_collector_loses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: reported.append(ignored.exc_type))

    def interrupt(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)
        raise ValueError

    before = signal.getsignal(signal.SIGINT)
    try:
        received = interrupts.note_interrupts()
        gc.callbacks.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            try:
                gc.collect()
            finally:
                gc.callbacks.remove(interrupt)
            assert (received[0], reported) == (signal.SIGINT, [ValueError])
            signal.sigtimedwait([], 60)  # the lost exception is raised again in a moment
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_an_error_that_a_library_makes_of_an_interrupt_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def main() -> int:
        interrupts.note_interrupts()  # as a part of the program may do
        with contextlib.suppress(KeyboardInterrupt):
            if is_interrupted:
                signal.raise_signal(signal.SIGINT)
        raise AttributeError

    before = signal.getsignal(signal.SIGINT)
    try:
        expected = contextlib.nullcontext() if is_interrupted else pytest.raises(AttributeError)
        with expected:
            assert interrupts.run(main) == interrupts.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)


PROGRAM = """
import os, signal, sys
{ends}
os.kill(os.getpid(), signal.SIGINT)
raise AssertionError("it went on")
"""


@pytest.mark.parametrize("ends", ["", "print(sys.argv[1:]); sys.exit(3)"], ids=["interrupted", "by itself"])
def test_a_module_is_run_and_ends_quietly_if_its_imports_are_interrupted(tmp_path: Path, ends: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(ends=ends))
    command = [sys.executable, "-m", "inflight.interrupts", "program", "--option", "value"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    expected = (3, "['--option', 'value']\n", "") if ends else (interrupts.INTERRUPTED, "", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize(
    "program",
    [
        "from inflight.doctor.programs import check_torch; list(check_torch(False))",
        "from inflight.load_model import import_for_good; import_for_good()",
    ],
)
def test_the_import_of_torch_is_not_interrupted(tmp_path: Path, program: str) -> None:
    """In its C++ code the exception would end the process by an abort."""
    (tmp_path / "torch.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); open('imported', 'w').close()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGINT and (tmp_path / "imported").exists(), done.stderr


def test_a_failure_of_a_program_that_was_interrupted_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGINT)

    def main(status: int, exits: bool) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return sys.exit(status) if exits else status

    try:
        assert interrupts.run(lambda: main(1, False)) == interrupts.INTERRUPTED
        assert interrupts.run(lambda: main(1, True)) == interrupts.INTERRUPTED
        assert interrupts.run(lambda: main(0, False)) == 0
        with pytest.raises(SystemExit):
            interrupts.run(lambda: main(0, True))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_was_held_back_ends_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)
        assert interrupts.run(lambda: pytest.fail("it was not interrupted")) == interrupts.INTERRUPTED
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
