"""Build the library that is preloaded into tritonserver: it refuses requests that would crash tritonserver.

It also records the last requests. Its source, `preload/request_checks.c`, lists which requests are refused.
The library is compiled at every start, in a fraction of a second, into the server's private folder. Without
a C compiler, the binary that a wheel has beside the source is used. `python -m
inflight.server.request_checks TARGET.so` compiles it for a tritonserver that another program starts.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parent / "preload" / "request_checks.c"
_PREBUILT = _SOURCE.with_suffix(".so")  # built by scripts/wheel
_COMPILERS = ("cc", "gcc", "clang", "g++")
_FLAGS = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-shared")
_TIMEOUT_S = 120.0  # some hundred times the time on an idle machine
_NOTES = "last_requests"
_SLOT_BYTES = 1024  # size of a record, as in the C source; each record begins with the request's number
_NUMBERED = re.compile(rb"(\d+) ([^\0]+)")


class CannotCompile(Exception):
    """The library could not be compiled. The message has the reason."""


def compile_checks(target: Path) -> Path:
    """Compile the library to `target`; raises CannotCompile with the reason."""
    names = (os.environ.get("CC", ""), *_COMPILERS)
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None and _PREBUILT.exists():
        shutil.copyfile(_PREBUILT, target)
        return target
    if compiler is None:
        raise CannotCompile(f"there is no C compiler ({', '.join(_COMPILERS)})")
    command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler} cannot be run: {error}") from error
    if done.returncode == -signal.SIGINT:  # Ctrl-C ended the compiler, too
        raise KeyboardInterrupt
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "no word")
        raise CannotCompile(f"{compiler} failed with status {done.returncode}: {first.strip()}")
    return target


def are_loaded(folder: Path) -> bool:
    """Return whether the tritonserver with this folder has loaded the library."""
    return (folder / _NOTES).exists()


def last_requests(folder: Path, most: int) -> list[str]:
    """Return the last requests, oldest first: the time, model, id, tensors and shapes of each."""
    try:
        content = (folder / _NOTES).read_bytes()
    except OSError:  # the library was not loaded
        return []
    slots = [content[begin : begin + _SLOT_BYTES] for begin in range(0, len(content), _SLOT_BYTES)]
    matches = [match for slot in slots if (match := _NUMBERED.match(slot))]
    matches.sort(key=lambda match: int(match[1]))
    return [match[2].decode("ascii", "replace") for match in matches[-most:]]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m inflight.server.request_checks TARGET.so")
    try:
        print(compile_checks(Path(sys.argv[1]).absolute()))
    except CannotCompile as error:
        sys.exit(str(error))
