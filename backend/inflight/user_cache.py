"""The folder in the user's cache for files that this package creates and can create again."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_WRITABLE_BY_OTHERS = 0o022
_UNUSED_S = 30 * 24 * 3600.0
PACKED_FOLDER, PACKED_SUFFIX = "packed", ".weights"
"""Folder of the files of packed weights, below the cache folder, and the end of their names."""


def cache_folder() -> Path | None:
    """Return the folder; None if it would be writable by other users, because code in it is executed."""
    candidates = [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]
    for candidate in candidates:
        folder = Path(candidate) / "inflight"
        if Path(candidate).is_absolute():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                continue
            found = folder.stat()
            is_private = found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS
            if is_private and os.access(folder, os.W_OK):
                return folder
    return None


def mark_used(file: Path) -> None:
    """Set a file's modification time to now; do nothing if it is missing or cannot be changed."""
    with contextlib.suppress(OSError):
        os.utime(file)


def remove_unused(folder: Path, pattern: str, but: Path) -> None:
    """Remove the files of a folder that match a pattern and were not marked as used for 30 days, except `but`.

    Files that cannot be removed stay.
    """
    now = time.time()
    for path in folder.glob(pattern):
        if path != but and now - modified_s(path) > _UNUSED_S:
            with contextlib.suppress(OSError):
                path.unlink()


def modified_s(path: Path) -> float:
    """Return the modification time in seconds since the epoch; infinity if the file no longer exists."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")
