"""Whether files of weights are complete, judged by their first bytes and their size. Any thread."""

from __future__ import annotations

from pathlib import Path

from inflight.safetensors_header import tensor_ranges

_POINTER = b"version https://git-lfs.github.com/spec/"


def lfs_pointer(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """Return what to do if a file is a pointer of Git LFS, which stands for a file that was not downloaded."""
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        try:
            with path.open("rb") as file:
                is_pointer = file.read(len(_POINTER)) == _POINTER
        except OSError:
            continue  # loading the model reports it
        if is_pointer:
            return f"{path} is a pointer of Git LFS instead of the file: run `git lfs pull` in {folder}"
    return None


def unreadable_weights(path: Path) -> str | None:
    """Return why a safetensors file cannot be read, judged by its header; None if it may be read."""
    expected, size = _bytes_by_header(path), path.stat().st_size
    if expected is not None and expected <= size:
        return None
    what = "no safetensors file" if expected is None else f"cut off: it has {size} of {expected} bytes"
    return f"{path} is {what}: download it again"


def _bytes_by_header(path: Path) -> int | None:
    """Return the size of a safetensors file according to its header; None if it has no such header."""
    with path.open("rb") as file:
        ranges = tensor_ranges(file.fileno())
    return None if ranges is None else max((end for _, end in ranges), default=0)
