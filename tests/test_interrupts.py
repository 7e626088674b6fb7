"""Ctrl-C while a server starts."""

import contextlib
import gc
import signal
import sys

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
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(interrupt)
        assert received == [signal.SIGINT]
        assert reported == [ValueError]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


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
