"""Run the perf_analyzer program that comes with tritonclient.

Its wheel brings the program without two libraries it is linked with. The server's wheel has both under other
file names, so they are linked under the names asked for in a folder that lives as long as the run.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from inflight.server.errors import ServeError
from inflight.server.installation import wheel_libraries

# What the program asks for, and how the server's wheel calls it.
_LIBRARIES = (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12.*"))


def find() -> Path:
    """The program, in the running environment."""
    program = Path(sys.executable).parent / "perf_analyzer"
    if not program.exists():
        raise ServeError("no perf_analyzer in this Python environment: it comes with tritonclient==2.50.0")
    return program


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Environment variables with which the program starts, for as long as the `with` lasts."""
    with tempfile.TemporaryDirectory(prefix="inflight-perf-analyzer-") as folder:
        for name, pattern in _LIBRARIES:
            _link(Path(folder) / name, pattern)
        yield {**os.environ, "LD_LIBRARY_PATH": folder}


def run(arguments: Sequence[str], timeout: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run it to its end with these arguments; the result holds its status, stdout and stderr."""
    with environment() as variables:
        command = [str(find()), *arguments]
        return subprocess.run(
            command, env=variables, timeout=timeout, text=True, capture_output=True, check=False
        )


def _link(link: Path, pattern: str) -> None:
    found = sorted(wheel_libraries().glob(pattern))
    if not found:
        raise ServeError(f"perf_analyzer needs {link.name}, and {wheel_libraries()} has no {pattern}")
    link.symlink_to(found[0])


def main() -> int:
    """Run it on this terminal with the arguments of the command line."""
    with environment() as variables:
        return subprocess.call([str(find()), *sys.argv[1:]], env=variables)


if __name__ == "__main__":
    sys.exit(main())
