"""KV blocks, and snapshots of recurrent state, in files that are found again by their keys after a restart.

    FOLDER/IDENTITY/lock           locked by the process that uses the files; it contains the process's label
    FOLDER/IDENTITY/3f/3f0a…       content of a block or snapshot, then a digest of it

A file is written under another name and renamed, and the digest is checked when it is read, so a crash, a torn
write or a flipped bit makes a file a miss, and its content is never wrong. Files have mode 0600, folders 0700. The
least recently used files are removed if all files together would be too large. Files that were not used for a
while are removed, too. While a server runs, the age of its files is measured by a clock that cannot be set.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inflight.block_store.tier_counts import TierCounts
from inflight.core.kv.store_stats import DISK, TierStats
from inflight.errors import ConfigError

CHECK_BYTES = 16
"""Bytes of the digest at the end of each file."""
_MIN_RENEWAL_S = 60.0
"""A file that was used less than this many seconds ago keeps its time in the file system."""
_log = logging.getLogger(__name__)
_KEY = re.compile("[0-9a-f]{32}")  # of a file, and the name of an identity
_LOCK = "lock"
_UNFINISHED = ".new"


@dataclass(frozen=True, slots=True)
class _SavedFile:
    """Size in bytes, and when the file was last used, in seconds of the monotonic clock.

    `renewed_at` is the last use that the file system knows.
    """

    size: int
    used_at: float
    renewed_at: float


@dataclass(frozen=True, slots=True)
class _Unused:
    """An identity that is not this process's: the size of its files, and when one of them was last used, in
    seconds since the epoch."""

    size: int
    used_at: float


class BlockFiles:
    """The saved blocks and snapshots of one identity in a folder. Any thread.

    Args:
        folder: The folder (kv_cache_dir), made if it is missing. Servers with different models may share it.
        identity: The identity of the content (`identity.cache_identity`).
        largest_bytes: Bytes of the largest content, a block or a snapshot.
        max_bytes: Maximum size of the folder's files: at the start of those of all identities, afterwards of
            those of this one.
        max_age_s: Seconds after its last use when a file is removed. At the start, this also applies to
            identities that no process uses.
        clock_s: Seconds since the epoch, for the times of files of earlier processes; injected by tests.
        monotonic_s: Seconds of a clock that cannot be set; injected by tests.
        num_ranks: Number of ranks, each of which has files of its own, and an equal part of `max_bytes`. With
            several, the caller calls `make_room`.
        label: Text for `is_in_use`; two processes have the same only if their identities are equal.

    Attributes:
        counts: Counts of the files. The caller counts what is loaded.

    Raises:
        ConfigError: The folder cannot be used, another process uses this identity there, or `max_bytes` is too
            small for one file.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        largest_bytes: int,
        max_bytes: int,
        max_age_s: float,
        clock_s: Callable[[], float] = time.time,
        num_ranks: int = 1,
        monotonic_s: Callable[[], float] = time.monotonic,
        label: str = "",
    ) -> None:
        self._label = label
        self._folder = folder / identity
        self._max_folder_bytes = max_bytes
        self.counts = TierCounts(DISK, max_bytes // num_ranks)
        self._max_age_s = max_age_s
        self._clock_s, self._monotonic_s = clock_s, monotonic_s
        if self.counts.max_bytes < largest_bytes + CHECK_BYTES:
            least = (largest_bytes + CHECK_BYTES) * num_ranks
            of_ranks = "" if num_ranks == 1 else f" of each of {num_ranks} ranks"
            raise ConfigError(
                f"kv_cache_disk_bytes is {max_bytes}, expected at least {least}, the size of one file{of_ranks}"
            )
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, _SavedFile] = OrderedDict()  # the least recently used first
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock_file = _lock(self._folder / _LOCK, label)
            if self._lock_file is None:
                raise ConfigError(
                    f"kv_cache_dir is {str(folder)!r}: another server uses the blocks of this model there; give "
                    "each server a folder of its own"
                )
            try:
                self._scan()
                if num_ranks == 1:
                    self.make_room()
            except BaseException:  # raised again; the next attempt must not find the folder locked
                self.close()
                raise
        except OSError as error:
            where = "" if error.filename in (None, str(folder)) else f"{error.filename}: "
            raise ConfigError(
                f"kv_cache_dir is {str(folder)!r}, which cannot be used: {where}{error.strerror or error}"
            ) from error

    def make_room(self) -> None:
        """Remove identities that no process uses, if they are older than `max_age_s` or the folder is too large.

        With several ranks, called when all have locked their files.
        """
        room = self._max_folder_bytes - self.counts.num_bytes
        with contextlib.suppress(OSError):  # someone has removed the folder
            _make_room(self._folder.parent, self._folder, room, self._clock_s() - self._max_age_s)

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of all files."""
        with self._lock:
            return tuple(self._files)

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a file with this key."""
        with self._lock:
            return key in self._files

    def write(self, key: bytes, content: NDArray[np.uint8]) -> list[bytes]:
        """Save `content`; return the keys of files that were removed to make room, or because of their age.

        Raises OSError or MemoryError if the file cannot be written; then nothing is changed.
        """
        path = self._path(key)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # someone may have removed it
        self._keep_locked()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, content)
                _write_all(file, np.frombuffer(_check(key, content), dtype=np.uint8))
            finally:
                os.close(file)
            os.replace(unfinished, path)
        except (OSError, MemoryError):
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self._forget(key)
            size = content.size + CHECK_BYTES
            now_s = self._monotonic_s()
            self._files[key] = _SavedFile(size, now_s, now_s)
            self.counts.saved.add(size)
        return self.expire()

    def expire(self) -> list[bytes]:
        """Remove files that are too old, or for which there is no room; return their keys."""
        with self._lock:
            removed = self._expired()
        for key in removed:
            self.remove(key)
        return removed

    def seconds_to_expiry(self) -> float | None:
        """Return the seconds until `expire` will find a file that is too old; None if there are no files."""
        with self._lock:
            oldest = next(iter(self._files.values()), None)
        return None if oldest is None else max(0.0, oldest.used_at + self._max_age_s - self._monotonic_s())

    def read(self, key: bytes, content: NDArray[np.uint8]) -> bool:
        """Read a file into `content`, which has its size; return whether it is there and intact.

        Otherwise the content is undefined, and the file is removed.
        """
        check = np.empty(CHECK_BYTES, dtype=np.uint8)
        try:
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                is_whole = _read_all(file, content) and _read_all(file, check)
            finally:
                os.close(file)
        except OSError:
            is_whole = False
        if not is_whole or check.tobytes() != _check(key, content):
            self.remove(key)
            return False
        self._renew(key)
        return True

    def use(self, key: bytes) -> None:
        """Count a file, if it is there, as used now, because its content was found in the device's cache."""
        self._renew(key, _MIN_RENEWAL_S)

    def _renew(self, key: bytes, min_age_s: float = 0.0) -> None:
        """Count a file as used now; in the file system only if it was last used `min_age_s` ago."""
        now_s = self._monotonic_s()
        with self._lock:
            file = self._files.get(key)
            if file is None:  # it may have been removed meanwhile
                return
            is_due = now_s - file.renewed_at >= min_age_s
            self._files[key] = replace(file, used_at=now_s, renewed_at=now_s if is_due else file.renewed_at)
            self._files.move_to_end(key)
        if is_due:
            with contextlib.suppress(OSError):  # only the order of removal after a restart depends on it
                os.utime(self._path(key))

    def remove(self, key: bytes) -> None:
        """Remove a file, if it is there."""
        with self._lock:
            self._forget(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def stats(self) -> TierStats:
        """Return the counts of the files."""
        with self._lock:
            return self.counts.stats()

    def close(self) -> None:
        """Let other processes use the files. Idempotent."""
        file, self._lock_file = self._lock_file, None
        if file is not None:
            os.close(file)

    def _keep_locked(self) -> None:
        """Lock the folder again, and say so in the log, if someone has removed the lock with the folder."""
        if self._lock_file is None or os.fstat(self._lock_file).st_nlink:
            return
        new = _lock(self._folder / _LOCK, self._label)
        os.close(self._lock_file)
        self._lock_file = new
        other = "" if new is not None else ", which another server uses for the same model meanwhile"
        _log.warning(
            "%s was removed while this server saves KV blocks in it: its blocks are lost, and further ones are "
            "saved in a new folder of that name%s",
            self._folder,
            other,
        )

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _forget(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self.counts.dropped.add(file.size)

    def _expired(self) -> list[bytes]:
        """Return the keys of files that are too old or for which there is no room, oldest first."""
        excess = self.counts.num_bytes - self.counts.max_bytes
        oldest = self._monotonic_s() - self._max_age_s
        found: list[bytes] = []
        for key, file in self._files.items():
            if excess <= 0 and file.used_at > oldest:
                break
            found.append(key)
            excess -= file.size
        return found

    def _scan(self) -> None:
        """Find the files of earlier processes; remove unfinished ones, and those that are too old or too many.

        A file whose time lies in the future, because a clock was set, counts as used now.
        """
        now_s, monotonic_s = self._clock_s(), self._monotonic_s()
        found: list[tuple[float, bytes, int]] = []
        for folder in self._folder.iterdir():
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                if _KEY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    found.append((status.st_mtime, bytes.fromhex(entry.name), status.st_size))
                    if status.st_mtime > now_s:
                        with contextlib.suppress(OSError):  # the next start finds it in the future again
                            os.utime(entry.path, (now_s, now_s))
                elif entry.name.endswith(_UNFINISHED) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
        for used_at, key, size in sorted(found):
            used_at = monotonic_s - max(0.0, now_s - used_at)
            self._files[key] = _SavedFile(size, used_at, used_at)
            self.counts.found.add(size)
        for key in self._expired():
            self.remove(key)


def _check(key: bytes, content: NDArray[np.uint8]) -> bytes:
    """Return a digest of the content; with the key in it, a file under another one's name is a miss."""
    return blake2b(content.data, digest_size=CHECK_BYTES, key=key).digest()


def _write_all(file: int, content: NDArray[np.uint8]) -> None:
    rest = content.data
    while rest:
        rest = rest[os.write(file, rest) :]


def _read_all(file: int, content: NDArray[np.uint8]) -> bool:
    rest = content.data
    while rest:
        count = os.readv(file, [rest])
        if not count:
            return False
        rest = rest[count:]
    return True


def is_in_use(folder: Path, label: str) -> bool:
    """Return whether a process has locked files with this label. Makes no file, and keeps no lock.

    Args:
        folder: The folder (kv_cache_dir), which need not exist.
        label: The label, not empty. Only files with this label are locked for a moment.
    """
    for path in folder.glob(f"*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
            if file.read() == label:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


def _lock(path: Path, label: str = "") -> int | None:
    """Lock a file for this process, until it is closed, and write the label into it; None if another process has
    locked it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # the disk is full
            os.ftruncate(file, 0)
            os.pwrite(file, label.encode(), 0)
        os.utime(path)
    except BaseException as error:  # raised again, unless another process has the lock
        os.close(file)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file


def _make_room(folder: Path, own: Path, max_bytes: int, oldest: float) -> None:
    """Remove the files of other identities that no process uses: those that were last used before `oldest`, and
    then the least recently used identity first, until the others take at most `max_bytes`."""
    found = {
        other: _unused(other) for other in folder.iterdir() if other != own and _KEY.fullmatch(other.name)
    }
    for other, unused in sorted(found.items(), key=lambda each: each[1].used_at):
        if unused.used_at >= oldest and sum(each.size for each in found.values()) <= max_bytes:
            return
        try:
            lock = _lock(other / _LOCK)
        except OSError:  # it belongs to another user, or another server has removed it meanwhile
            continue
        if lock is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)
            del found[other]


def _unused(folder: Path) -> _Unused:
    """Return the size and last use of an identity's files, without those that cannot be seen or vanish
    meanwhile."""
    size, used_at = 0, 0.0
    with contextlib.suppress(OSError):
        for path in (folder, folder / _LOCK, *folder.glob("*/*")):
            with contextlib.suppress(OSError):
                status = path.stat()
                size += 0 if path.parent == folder.parent or path.name == _LOCK else status.st_size
                used_at = max(used_at, status.st_mtime)
    return _Unused(size, used_at)
