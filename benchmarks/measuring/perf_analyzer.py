"""Run the perf_analyzer program of tritonclient.

tritonclient's wheel lacks two libraries that the program needs. The server's wheel has both with other file
names, so links with the needed names are made in a temporary folder during the run.

The program's export of requests (`--profile-export-file`) is sometimes incomplete although the exit status
is 0. It writes a number for every output of the model, and if a response lacks the output, it interprets
four uninitialized bytes as float32. If they are not a finite number, which JSON cannot express, it stops
writing.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.server.errors import ServeError
from inflight.server.installation import wheel_libraries

# Libraries that the program needs, and their names in the server's wheel.
_LIBRARIES = (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12.*"))

_ERROR_LINES = 4  # lines of an error that are shown; the program's usage follows
_ATTEMPTS = 3
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


def run(arguments: Sequence[str], timeout: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the program with these arguments until it ends; return its status, stdout and stderr."""
    with environment() as variables:
        command = [str(find()), *arguments]
        return subprocess.run(
            command, env=variables, timeout=timeout, text=True, capture_output=True, check=False
        )


def export(arguments: Sequence[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """Run the program with these arguments and return the experiments that it exports, one per level of load.

    If the export is incomplete, runs the program again, at most twice.

    Raises:
        ServeError: The program failed, with its output, or all its exports were incomplete.
        subprocess.TimeoutExpired: A run took longer than `timeout` seconds.
    """
    text = ""
    for _ in range(_ATTEMPTS):
        text = _export(arguments, timeout)
        # The export has the responses' bytes, which are not valid UTF-8 if a response ends inside a
        # character.
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text, strict=False)["experiments"]
    raise ServeError(
        f"perf_analyzer's export was not JSON {_ATTEMPTS} times; the last ends with {text[-100:]!r}"
    )


def _export(arguments: Sequence[str], timeout: float | None) -> str:
    with tempfile.TemporaryDirectory(prefix="inflight-perf-analyzer-") as folder:
        path = Path(folder) / "profile.json"
        # If no model version is named, perf_analyzer takes the version whose statistics have changed. It fails if
        # they have not changed yet, because the server counts a request only after its response.
        done = run([*arguments, "-x", _VERSION, "--profile-export-file", str(path)], timeout)
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
