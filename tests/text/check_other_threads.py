"""Threads that run while a prompt is encoded. Run by test_tokenizer.py, in a process of its own."""

from __future__ import annotations

import sys
import threading

from tests.text.tiny_tokenizers import tokenizer

_MAX_TRIES = 200


def test_a_long_prompt_leaves_the_processor_to_other_threads() -> None:
    """As no thread is interrupted, the other one runs only if `encode` releases the interpreter's lock.

    On a busy machine that takes several calls, until it gets a processor during one of them.
    """
    encode = tokenizer("byte_level").encode
    sys.setswitchinterval(3600.0)
    gate = threading.Lock()
    gate.acquire()
    has_run: list[bool] = []
    other = threading.Thread(target=lambda: (gate.acquire(), has_run.append(True)))
    other.start()
    gate.release()
    assert not has_run
    for _ in range(_MAX_TRIES):
        if not has_run:
            encode("x " * 20_000)
    assert has_run
