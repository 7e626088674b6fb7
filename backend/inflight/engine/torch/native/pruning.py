"""What is kept of earlier builds: what somebody has loaded lately.

A library's modification time is when it was last loaded or built; whoever loads one says so. Every version of the
sources, the compiler and the processor has libraries of its own, and nothing tells which of them are still
installed somewhere, so age decides. To remove one that a process has loaded does that process no harm: the file
lives on until the last of them has ended. One that is needed again is built again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

BUILD_PREFIX = "build-"
"""Of the folders that builds work in; one is left behind only if its process was killed."""
_UNUSED_S = 30 * 24 * 3600.0
_ABANDONED_S = 24 * 3600.0  # far longer than any build takes


def mark_used(library: Path) -> None:
    """Note that a library is being loaded; if it is not there, or cannot be marked, nothing."""
    with contextlib.suppress(OSError):
        os.utime(library)


def prune(folder: Path, but: Path) -> None:
    """Remove the libraries in a cache folder that nobody has loaded for 30 days, and what dead builds left.

    Called by whoever has just built `but`, which stays. What cannot be removed stays too.
    """
    now = time.time()
    for path in folder.glob("decoder-*.so"):
        if path != but and now - _modified(path) > _UNUSED_S:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"{BUILD_PREFIX}*"):
        if now - _modified(path) > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    """Seconds since the epoch; the far future for what has gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")
