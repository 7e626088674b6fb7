"""The folder in the user's cache for files that this package makes and may make again."""

from __future__ import annotations

import os
from pathlib import Path

_WRITABLE_BY_OTHERS = 0o022


def cache_folder() -> Path | None:
    """Return the folder, writable by this user only as code in it is executed; None without one."""
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
