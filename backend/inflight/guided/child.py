"""`python -m inflight.guided.child BACKEND`: compiles guides for an engine, in a process that can be killed.

Reads a vocabulary from standard input, and answers when it is ready; then reads one job after another. Ends
at the end of its input, or when the thread that started it ends. Its memory is limited, and it gets
processor time only while no other process needs it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import IO

import msgspec

from inflight.core.request.guide import Guide
from inflight.errors import InflightError
from inflight.guided.budget import try_out
from inflight.guided.make_backend import make_backend
from inflight.guided.vocabulary import GuideVocabulary

MAX_MEMORY_BYTES = 4 << 30
_NICENESS = 10
_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 8


class CompileJob(msgspec.Struct, frozen=True):
    """Engine → child process: a guide to compile."""

    guide: Guide


class CompileAnswer(msgspec.Struct, frozen=True):
    """Child process → engine: the result of `GuideBackend.compile`, or the kind and marked message of its error.

    The first answer follows the vocabulary and is empty.
    """

    compiled: bytes = b""
    error_kind: str = ""
    error: str = ""


def main(backend_name: str) -> None:
    """Compile guides until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the engine, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a library's prints go to stderr and not into the answers
    compile_jobs(backend_name, jobs, answers)


def compile_jobs(backend_name: str, jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Read a vocabulary, then guides, and write an answer to each, until the input ends.

    Args:
        backend_name: The grammar library.
        jobs: The engine's messages: the vocabulary first, then `CompileJob`s.
        answers: Gets the `CompileAnswer`s.
    """
    first = read_frame(jobs)
    if first is None:
        return
    vocabulary = msgspec.msgpack.decode(first, type=GuideVocabulary)
    backend = make_backend(backend_name, vocabulary)
    write_frame(answers, CompileAnswer())
    while (frame := read_frame(jobs)) is not None:
        guide = msgspec.msgpack.decode(frame, type=CompileJob).guide
        try:
            answer = CompileAnswer(backend.compile(guide))
            try_out(backend, vocabulary, guide, answer.compiled)
        except InflightError as error:
            answer = CompileAnswer(error_kind=error.kind, error=error.marked)
        write_frame(answers, answer)


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read the next message; None at the end of the file."""
    header = file.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(header, "big")
    body = file.read(length)
    return body if len(body) == length else None


def write_frame(file: IO[bytes], message: GuideVocabulary | CompileJob | CompileAnswer) -> None:
    """Write a message with its length before it, and flush."""
    body = msgspec.msgpack.encode(message)
    file.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
