"""SHA-256 digests of a checkpoint's files, for receipts.

The digests of a loaded model are computed once, on a thread that starts with the first request for a
receipt, so that a start does not wait for them. Digests of large files are kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import InflightError, Unavailable
from inflight.pickled_header import pickled_file
from inflight.user_cache import cache_folder, mark_used, remove_unused

_SUFFIXES = frozenset({".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".plan", ".engine"})
_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20
_SHA256_DIGITS = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FileState:
    """The state of a file by which changes are noticed: its size in bytes, and when it was modified."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> _FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


class Closed(Exception):
    """The engine was closed before all digests were computed."""


class ModelFiles:
    """The files of a model, as they are when this object is made.

    Args:
        folders: Folders of the model by the prefix of their files' names: "" for the checkpoint. Files in
            formats that a model is not loaded from, and links to missing files, are left out.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._files: dict[str, tuple[Path, _FileState]] = {}
        for prefix, folder in folders.items():
            pickled = pickled_file(folder)
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if (path.suffix in _SUFFIXES or path == pickled) and path.is_file():
                    self._files[prefix + path.name] = path.resolve(), _FileState.of(path)

    def digests(
        self, trusts_cache: bool = True, is_closed: Callable[[], bool] = lambda: False
    ) -> dict[str, str]:
        """Return the SHA-256 digest of each file by name; reads all files.

        Args:
            trusts_cache: Whether the digest of a large file may come from the user's cache, if size and time of
                modification are the same.
            is_closed: Whether to give up.

        Raises:
            Unavailable: A file cannot be read, or was changed since this object was made.
            Closed: `is_closed` returned true.
        """
        return {
            name: self._digest(name, path, version, trusts_cache, is_closed)
            for name, (path, version) in self._files.items()
        }

    def changed(self) -> str:
        """Return the name of a file that was changed or removed since this object was made; "" if none was."""
        for name, (path, version) in self._files.items():
            try:
                if _FileState.of(path) != version:
                    return name
            except OSError:
                return name
        return ""

    def _digest(
        self, name: str, path: Path, version: _FileState, trusts_cache: bool, is_closed: Callable[[], bool]
    ) -> str:
        cached = _cache_file(path) if version.size >= _LARGE_BYTES else None
        try:
            found = _read_cached(cached, version) if cached is not None and trusts_cache else None
            digest = found or _sha256(path, is_closed)
            if _FileState.of(path) != version:
                raise Unavailable(f"no receipts: {name} was changed after the model was loaded")
        except OSError as error:
            raise Unavailable(f"no receipts: {name} cannot be read: {error.strerror}") from error
        if cached is not None and found is None:
            _write_cached(cached, version, digest)
        return digest


class BackgroundDigests:
    """The digests of a model's files, computed on a thread of its own that `start` starts.

    Args:
        files: The files.
        on_end: Called on the thread when the digests are known, or an error is.
    """

    def __init__(self, files: ModelFiles, on_end: Callable[[], None]) -> None:
        self._files = files
        self._on_end = on_end
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._found: dict[str, str] | InflightError | None = None

    @property
    def have_ended(self) -> bool:
        """Whether the digests are known, or an error is."""
        return self._found is not None

    def start(self) -> None:
        """Start to compute, at the first call; never blocks. Raises the error of an earlier start."""
        if isinstance(self._found, InflightError):
            raise self._found
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="inflight-digests", daemon=True)
                self._thread.start()

    def result(self) -> dict[str, str]:
        """Return the digests by name; raise the error, or Unavailable if they are not known yet."""
        if isinstance(self._found, InflightError):
            raise self._found
        if self._found is None:
            raise Unavailable("the digests of the model's files are not known yet")
        return self._found

    def close(self) -> None:
        """Stop reading files, and wait until the thread has ended.

        If the digests are not known yet, they never will be: `result` goes on to raise Unavailable, and `start`
        starts nothing. Later calls do nothing.
        """
        with self._lock:
            self._is_closed, thread = True, self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            found: dict[str, str] | InflightError = self._files.digests(is_closed=lambda: self._is_closed)
        except Closed:
            return
        except InflightError as error:
            _log.warning("%s", error)
            found = error
        self._found = found
        self._on_end()


def _sha256(path: Path, is_closed: Callable[[], bool]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if is_closed():
                raise Closed
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------- the user's cache


def _cache_file(path: Path) -> Path | None:
    """Return the file that keeps the digest of the file at `path`; None without a cache."""
    folder = cache_folder()
    if folder is None:
        return None
    return folder / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def _read_cached(file: Path, version: _FileState) -> str | None:
    """Return the digest in the cache; None if there is none for this version of the file."""
    with contextlib.suppress(OSError, ValueError):
        size, modified_ns, digest = file.read_text(encoding="ascii").split()
        if _FileState(int(size), int(modified_ns)) == version and len(digest) == _SHA256_DIGITS:
            mark_used(file)
            return digest
    return None


def _write_cached(file: Path, version: _FileState, digest: str) -> None:
    """Keep a digest; do nothing if the cache cannot be written."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = file.with_name(f".{file.name}-{os.getpid()}")
        unfinished.write_text(f"{version.size} {version.modified_ns} {digest}\n", encoding="ascii")
        unfinished.replace(file)
        remove_unused(file.parent, "*", file)
