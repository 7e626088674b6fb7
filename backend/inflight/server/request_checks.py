"""A small library that tritonserver loads first: it refuses requests that would end it, and notes the last ones.

`preload/request_checks.c` is its source, and says what it refuses. It is compiled at every start, in a fraction of
a second, into the server's private folder. Without a C compiler the one that a wheel brings beside the source is
used, or else none.
`python -m inflight.server.request_checks TARGET.so` compiles it for a tritonserver that something else starts.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parent / "preload" / "request_checks.c"
_PREBUILT = _SOURCE.with_suffix(".so")  # by scripts/wheel
_COMPILERS = ("cc", "gcc", "clang", "g++")
_FLAGS = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-shared")
_TIMEOUT_S = 120.0  # some hundred times what it takes on a machine that does nothing else
_NOTES = "last_requests"
_SLOT_BYTES = 1024  # as in the source, and the number that each slot begins with
_NUMBERED = re.compile(rb"(\d+) ([^\0]+)")


class CannotCompile(Exception):
    """The reason why the library could not be compiled."""


def compile_checks(target: Path) -> Path:
    """Make the library at `target`; CannotCompile, with the reason, where that fails."""
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
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "no word")
        raise CannotCompile(f"{compiler} failed with status {done.returncode}: {first.strip()}")
    return target


def are_loaded(folder: Path) -> bool:
    """Whether a tritonserver whose folder this is has loaded the library."""
    return (folder / _NOTES).exists()


def last_requests(folder: Path, most: int) -> list[str]:
    """The last requests, oldest first: when each came, its model, its id, its tensors and their shapes."""
    try:
        content = (folder / _NOTES).read_bytes()
    except OSError:  # it was not loaded
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
