"""Checks of the room on disks: the temporary folder, and the caches of this package and of the Hugging Face hub.

One thread.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inflight.doctor.finding import Finding, green, red, yellow

MIN_TEMPORARY_BYTES = 16 << 20
"""Room for a server's folder: configurations, compiled request checks, logs."""

_MIN_OWN_BYTES = 32 << 20  # compiled layers of a few dtypes, and folders of GGUF files
_MIN_HUB_BYTES = 1 << 30


def check_temporary_folder() -> Iterator[Finding]:
    """Report whether the temporary folder has room for a server's own files."""
    name, folder = "temporary folder", Path(tempfile.gettempdir())
    free, says = _room(folder)
    if free < MIN_TEMPORARY_BYTES:
        needed = f"a server needs {MIN_TEMPORARY_BYTES >> 20} MiB"
        yield red(name, f"{says}; {needed}", f"free space in {folder}, or set TMPDIR to another folder")
    else:
        yield green(name, says)


def check_own_cache() -> Iterator[Finding]:
    """Report whether the user's cache has room for compiled layers, and for folders of GGUF files."""
    from inflight.user_cache import cache_folder

    name, folder = "inflight's cache", cache_folder()
    mend = "set XDG_CACHE_HOME to a folder of yours with room"
    if folder is None:
        says = "neither XDG_CACHE_HOME nor ~/.cache is writable by this user alone"
        yield yellow(name, f"{says}: layers are compiled at every start, GGUF files are refused", mend)
        return
    free, says = _room(folder)
    if free < _MIN_OWN_BYTES:
        says += "; compiled layers and folders of GGUF files may not fit"
        yield yellow(name, says, f"free space in {folder}, or {mend}")
    else:
        yield green(name, says)


def check_hub_cache() -> Iterator[Finding]:
    """Report whether checkpoints can be downloaded into the cache of the Hugging Face hub."""
    from huggingface_hub import constants

    name, folder = "hub's cache", Path(constants.HF_HUB_CACHE)
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free, says = _room(folder)
    mend = "set HF_HOME to a folder with room"
    if not os.access(existing, os.W_OK):
        yield yellow(name, f"{existing} is not writable: no checkpoint can be downloaded to {folder}", mend)
    elif free < _MIN_HUB_BYTES:
        says += "; a checkpoint of a billion parameters takes about 2.5 GiB"
        yield yellow(name, says, f"free space in {existing}, or {mend}")
    else:
        yield green(name, says)


def _room(folder: Path) -> tuple[int, str]:
    """Return the number of free bytes where a folder is, or would be made, and these in words."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    size = f"{free / 2**30:.1f} GiB" if free >= 1 << 30 else f"{free >> 20} MiB"
    return free, f"{folder}, {size} free"
