"""Ctrl-C while a server without a tritonserver loads its model."""

import gc
import signal

import pytest

from inflight import standalone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_noted_although_a_callback_of_the_garbage_collector_loses_it() -> None:
    def interrupt(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts = standalone._note_interrupts()
        gc.callbacks.append(interrupt)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(interrupt)
        assert interrupts == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
