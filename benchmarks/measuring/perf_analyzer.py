"""Run the perf_analyzer program of tritonclient.

tritonclient's wheel lacks two libraries that the program needs. The server's wheel has both with other file
names, so links with the needed names are made in a temporary folder during the run.

The program's export of requests (`--profile-export-file`) is sometimes incomplete although the exit status
is 0. It writes a number for every output of the model, and if a response lacks the output, it interprets
four uninitialized bytes as float32. If they are not a finite number, which JSON cannot express, it stops
writing.

With `--request-count`, the program sometimes never ends. Its first thread deletes the records of all requests
that have ended before it begins to count them. This happens if other processes keep that thread from running
while the server answers. The program then waits for as many further requests, which it does not send.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.server.errors import ServeError
from inflight.server.installation import wheel_libraries

# Libraries that the program needs, and their names in the server's wheel.
_LIBRARIES = (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12.*"))

_ERROR_LINES = 4  # lines of an error that are shown; the program's usage follows
_ATTEMPTS = 3
_CHECK_S = 30.0  # between two checks whether a server is idle
_VERSION = "1"  # of all models in model_repository


def find() -> Path:
    """Return the path of the program in the running environment."""
    program = Path(sys.executable).parent / "perf_analyzer"
    if not program.exists():
        raise ServeError("no perf_analyzer in this Python environment: it comes with tritonclient==2.50.0")
    return program


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Yield the program's environment variables. The links to its libraries exist until the `with` block ends."""
    with tempfile.TemporaryDirectory(prefix="inflight-perf-analyzer-") as folder:
        for name, pattern in _LIBRARIES:
            _link(Path(folder) / name, pattern)
        yield {**os.environ, "LD_LIBRARY_PATH": folder}


class LostRecordsError(Exception):
    """The program waits for requests whose records it has deleted."""


def run(
    arguments: Sequence[str], timeout: float = math.inf, is_idle: Callable[[], bool] = lambda: False
) -> "subprocess.CompletedProcess[str]":
    """Run the program with these arguments until it ends; return its status, stdout and stderr.

    Args:
        arguments: The program's arguments.
        timeout: Seconds that the run may take.
        is_idle: Returns whether the server has answered all requests that it has received. It is called every
            half minute.

    Raises:
        LostRecordsError: The server was idle twice in a row, and the program still ran.
        subprocess.TimeoutExpired: The run took longer than `timeout` seconds.
    """
    with environment() as variables:
        command = [str(find()), *arguments]
        with subprocess.Popen(
            command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                stdout, stderr = _communicate(process, timeout, is_idle)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def export(
    arguments: Sequence[str], timeout: float = math.inf, is_idle: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Run the program with these arguments and return the experiments that it exports, one per level of load.

    If the export is incomplete, or the program loses records (see `run`), runs it again, at most twice.

    Raises:
        ServeError: The program failed, with its output, or no run had a complete export.
        subprocess.TimeoutExpired: A run took longer than `timeout` seconds.
    """
    problem = ""
    for _ in range(_ATTEMPTS):
        try:
            text = _export(arguments, timeout, is_idle)
        except LostRecordsError:
            problem = "it did not end although the server was idle"
            continue
        # The export has the responses' bytes, which are not valid UTF-8 if a response ends inside a
        # character.
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text, strict=False)["experiments"]
        problem = f"its export was not JSON, and ends with {text[-100:]!r}"
    raise ServeError(f"perf_analyzer failed {_ATTEMPTS} times; the last time, {problem}")


def _communicate(
    process: "subprocess.Popen[str]", timeout: float, is_idle: Callable[[], bool]
) -> tuple[str, str]:
    end = time.monotonic() + timeout
    was_idle = False
    while True:
        try:
            return process.communicate(timeout=min(_CHECK_S, max(end - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise
        is_idle_now = is_idle()
        if was_idle and is_idle_now:
            raise LostRecordsError
        was_idle = is_idle_now


def _export(arguments: Sequence[str], timeout: float, is_idle: Callable[[], bool]) -> str:
    with tempfile.TemporaryDirectory(prefix="inflight-perf-analyzer-") as folder:
        path = Path(folder) / "profile.json"
        # If no model version is named, perf_analyzer takes the version whose statistics have changed. It fails if
        # they have not changed yet, because the server counts a request only after its response.
        done = run([*arguments, "-x", _VERSION, "--profile-export-file", str(path)], timeout, is_idle)
        if done.returncode:
            said = (done.stderr or done.stdout).splitlines()[:_ERROR_LINES]
            raise ServeError("\n".join([f"perf_analyzer ended with {done.returncode}:", *said]))
        return path.read_text("utf-8", "replace")


def _link(link: Path, pattern: str) -> None:
    found = sorted(wheel_libraries().glob(pattern))
    if not found:
        raise ServeError(f"perf_analyzer needs {link.name}, and {wheel_libraries()} has no {pattern}")
    link.symlink_to(found[0])


def main() -> int:
    """Run the program with the command line's arguments; print advice if a server refuses it access."""
    is_refused = False
    with environment() as variables:
        command = [str(find()), *sys.argv[1:]]
        with subprocess.Popen(
            command, env=variables, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stderr is not None, "it is a pipe"
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                is_refused |= "is restricted" in line
    if is_refused:
        print("perf_analyzer: start the server with --allow-model-config", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
