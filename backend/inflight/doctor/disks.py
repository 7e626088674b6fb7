"""Checks of the room on disks: the temporary folder, and the caches of this package and of the Hugging Face hub.

One thread.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inflight.checkpoint_config import checkpoint_name
from inflight.doctor.finding import Finding, green, red, yellow
from inflight.engine.cpu.library import COMPILED_ONCE, CannotBuild, foresee
from inflight.errors import ConfigError
from inflight.user_cache import PACKED_FOLDER, PACKED_SUFFIX, cache_folder

MIN_TEMPORARY_BYTES = 16 << 20
"""Room for a server's folder: configurations, compiled request checks, logs."""

_MIN_OWN_BYTES = 32 << 20  # compiled layers of a few dtypes, and folders of GGUF files
_MIN_HUB_BYTES = 1 << 30
_OTHER_CACHE = "set XDG_CACHE_HOME to a folder of yours with room"


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
    name, folder, mend = "inflight's cache", cache_folder(), _OTHER_CACHE
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


def full_for_saved_blocks(folder: Path, limit: int) -> str | None:
    """Return a warning if the files of saved KV blocks cannot grow to their limit; None if they can.

    Args:
        folder: Folder of --kv-cache-dir, which need not exist.
        limit: Maximum size of all its files in bytes, which includes files of earlier servers.
    """
    free, says = _room(folder)
    if free >= limit or free + _size_of_files(folder) >= limit:
        return None
    return (
        f"--kv-cache-dir: {says}, and --kv-cache-disk is {_size(limit)}: no KV blocks are saved on a full disk; "
        "lower --kv-cache-disk, or free space"
    )


def full_for_packed_weights(checkpoint: Path, least: int) -> str | None:
    """Return a warning if the packed weights of a checkpoint cannot be written; None if they are there, or fit.

    Args:
        checkpoint: The checkpoint folder.
        least: The least number of bytes that they take.
    """
    folder = cache_folder()
    if folder is None:
        return None  # the load reports it
    free, says = _room(folder)
    name = glob.escape(checkpoint_name(checkpoint).replace("/", "--"))
    if free >= least or any((folder / PACKED_FOLDER).glob(f"{name}-*{PACKED_SUFFIX}")):
        return None
    return (
        f"{says}, and the file of --weights mmap takes at least {_size(least)}: without the file the weights are "
        f"loaded into memory; free space, or {_OTHER_CACHE}"
    )


def full_for_compiled_layers(dtype: str, int8: bool) -> str | None:
    """Return a warning if compiled layers would be written to a full disk; None if they are there, or fit.

    Args:
        dtype: Dtype of activations.
        int8: Whether weights have 8 or 4 bits.
    """
    folder = cache_folder()
    if folder is None:
        return None  # as with a read-only disk, the layers are compiled at every start
    free, says = _room(folder)
    if free >= _MIN_OWN_BYTES:
        return None
    try:
        if COMPILED_ONCE not in foresee(dtype, int8):
            return None
    except (CannotBuild, ConfigError):
        return None  # there is nothing to write
    return f"{says}: the compiled layers may not fit; free space, or {_OTHER_CACHE}"


def _size_of_files(folder: Path) -> int:
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    total = 0
    for file in found:
        with contextlib.suppress(OSError):  # another server may have removed it
            total += file.stat().st_size
    return total


def _room(folder: Path) -> tuple[int, str]:
    """Return the number of free bytes where a folder is, or would be made, and these in words."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    return free, f"{folder}, {_size(free)} free"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"
