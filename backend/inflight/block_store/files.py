"""KV blocks in files, one file for each, that are found again by their digests after a restart.

    FOLDER/IDENTITY/lock           locked by the process that uses the blocks
    FOLDER/IDENTITY/3f/3f0a…       content of the block, then a digest of it

A file is written under another name and renamed, and the digest is checked when it is read, so a crash, a torn
write or a flipped bit makes a block a miss and never wrong. Files have mode 0600, folders 0700. The least recently
used files are removed if all together would be too large, and files that were not used for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inflight.errors import ConfigError

_CHECK_BYTES = 16
_IDENTITY = re.compile("[0-9a-f]{32}")
_LOCK = "lock"
_UNFINISHED = ".new"


class BlockFiles:
    """The saved blocks of one identity in a folder. Any thread.

    Args:
        folder: The folder (kv_cache_dir), made if it is missing. Servers with different models may share it.
        identity: The identity of the blocks' content (`identity.cache_identity`).
        block_bytes: Bytes of a block.
        max_bytes: Maximum size of all files of all identities at the start, and of this one's later.
        max_age_s: Seconds after its last use when a file is removed.
        clock_s: Seconds since the epoch; injected by tests.

    Raises:
        ConfigError: The folder cannot be used, another process uses its blocks, or `max_bytes` is too small for
            one block.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        block_bytes: int,
        max_bytes: int,
        max_age_s: float,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder / identity
        self._block_bytes = block_bytes
        self._max_age_s = max_age_s
        self._clock_s = clock_s
        self._max_files = max_bytes // (block_bytes + _CHECK_BYTES)
        if not self._max_files:
            raise ConfigError(
                f"kv_cache_disk_bytes is {max_bytes}, expected at least {block_bytes + _CHECK_BYTES}, the size of "
                "one KV block"
            )
        self._lock = threading.Lock()
        self._used_at: OrderedDict[bytes, float] = OrderedDict()  # the least recently used first
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = _lock(self._folder / _LOCK)
            if self._lock_file is None:
                raise ConfigError(
                    f"kv_cache_dir is {str(folder)!r}: another server uses the blocks of this model there; give "
                    "each server a folder of its own"
                )
            self._scan()
            _make_room(folder, self._folder, max_bytes - len(self._used_at) * (block_bytes + _CHECK_BYTES))
        except OSError as error:
            raise ConfigError(
                f"kv_cache_dir is {str(folder)!r}, which cannot be used: {error.strerror or error}"
            ) from error

    def digests(self) -> tuple[bytes, ...]:
        """Return the digests of all saved blocks."""
        with self._lock:
            return tuple(self._used_at)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block with this digest is saved."""
        with self._lock:
            return digest in self._used_at

    def write(self, digest: bytes, content: NDArray[np.uint8]) -> list[bytes]:
        """Save a block, `content` [block_bytes]; return the digests of blocks that were removed for it.

        Raises OSError if the file cannot be written; then no block is changed.
        """
        path = self._path(digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, content)
                _write_all(file, np.frombuffer(_check(digest, content), dtype=np.uint8))
            finally:
                os.close(file)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self._use(digest)
            oldest = self._clock_s() - self._max_age_s
            removed: list[bytes] = []
            for other, used_at in self._used_at.items():
                if len(self._used_at) - len(removed) <= self._max_files and used_at >= oldest:
                    break
                removed.append(other)
        for other in removed:
            self.remove(other)
        return removed

    def read(self, digest: bytes, content: NDArray[np.uint8]) -> bool:
        """Read a block into `content` [block_bytes]; return whether it is there and intact.

        Otherwise the content is undefined, and the file is removed.
        """
        check = np.empty(_CHECK_BYTES, dtype=np.uint8)
        try:
            file = os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)
            try:
                is_whole = _read_all(file, content) and _read_all(file, check)
            finally:
                os.close(file)
        except OSError:
            is_whole = False
        if not is_whole or check.tobytes() != _check(digest, content):
            self.remove(digest)
            return False
        with contextlib.suppress(OSError):  # only the order of removal after a restart depends on it
            os.utime(self._path(digest))
        with self._lock:
            self._use(digest)
        return True

    def remove(self, digest: bytes) -> None:
        """Remove a block, if it is there."""
        with self._lock:
            self._used_at.pop(digest, None)
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def close(self) -> None:
        """Let other processes use the blocks. Idempotent."""
        file, self._lock_file = self._lock_file, None
        if file is not None:
            os.close(file)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def _use(self, digest: bytes) -> None:
        self._used_at[digest] = self._clock_s()
        self._used_at.move_to_end(digest)

    def _scan(self) -> None:
        """Find the files of earlier processes; remove unfinished ones, and those that are too old or too many."""
        found: list[tuple[float, bytes]] = []
        for folder in self._folder.iterdir():
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                name = entry.name
                digest = bytes.fromhex(name) if _IDENTITY.fullmatch(name) else b""
                status = entry.stat()
                if digest and status.st_size == self._block_bytes + _CHECK_BYTES:
                    found.append((status.st_mtime, digest))
                else:
                    os.unlink(entry.path)
        found.sort()
        oldest = self._clock_s() - self._max_age_s
        self._used_at.update((digest, used_at) for used_at, digest in found)
        for place, (used_at, digest) in enumerate(found):
            if len(found) - place > self._max_files or used_at < oldest:
                self.remove(digest)


def _check(digest: bytes, content: NDArray[np.uint8]) -> bytes:
    """Return the digest of a block's content; the key makes a file under another block's name a miss."""
    return blake2b(content, digest_size=_CHECK_BYTES, key=digest).digest()


def _write_all(file: int, content: NDArray[np.uint8]) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read_all(file: int, content: NDArray[np.uint8]) -> bool:
    rest = memoryview(content)
    while rest:
        count = os.readv(file, [rest])
        if not count:
            return False
        rest = rest[count:]
    return True


def _lock(path: Path) -> int | None:
    """Lock a file for this process, until it is closed; None if another process has locked it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    os.utime(path)
    return file


def _make_room(folder: Path, own: Path, max_bytes: int) -> None:
    """Remove the blocks of other identities that no process uses, the least recently used identity first, until
    the others take at most `max_bytes`."""
    sizes: dict[Path, int] = {}
    for other in folder.iterdir():
        if other != own and _IDENTITY.fullmatch(other.name) and other.is_dir():
            sizes[other] = sum(path.stat().st_size for path in other.glob("*/*"))
    for other in sorted(sizes, key=_used_at):
        if sum(sizes.values()) <= max_bytes:
            return
        lock = _lock(other / _LOCK)
        if lock is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)
            del sizes[other]


def _used_at(folder: Path) -> float:
    try:
        return (folder / _LOCK).stat().st_mtime
    except OSError:
        return 0.0
