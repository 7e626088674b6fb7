"""The folder of files and batches: its lock, its size, and the files that clients have uploaded.

A file is `file-….jsonl`, and `file-….json` describes it; without a description it is not visible yet: an upload
that has not ended, or the output of a running batch. `batch_….json` is the state of a batch. Runs on the event
loop, except what is said to run on other threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from inflight.errors import ConfigError, InflightError

ENTRY_BYTES = 4096
"""Size that is counted for each file and each batch beside its content: a block of the disk."""
_PRIVATE = 0o600
_PART_BYTES = 1 << 20

_Record = TypeVar("_Record", bound=msgspec.Struct)


class FolderFull(InflightError):
    """A folder of batches without room for more."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it is described on disk.

    Attributes:
        owner: Digest of the API key that it belongs to, in hexadecimal; "": the server has no keys.
        id, bytes, created_at, filename, purpose: As in OpenAI's file object.
    """

    owner: str
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def as_json(self) -> dict[str, object]:
        """Return the description in the form of OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


_LOCK = ".lock"


def is_in_use(path: Path) -> bool:
    """Return whether a process uses the folder, which need not exist. Makes no file, and keeps no lock."""
    with contextlib.suppress(OSError), (path / _LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class BatchFolder:
    """The files in a folder, which only this process uses until `close`.

    Args:
        path: The folder, which is created if it is missing.
        max_bytes: Largest size of everything in it, in bytes.

    Raises:
        ConfigError: Another server uses the folder.
        OSError: The folder cannot be used.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, _PRIVATE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"--batch-dir {path}: another server uses this folder") from None
        records = self.read_records("file-", FileRecord)
        self._files = {each.id: each for each in sorted(records, key=lambda each: each.created_at)}
        self._num_bytes = sum(ENTRY_BYTES + each.bytes for each in self._files.values())

    def close(self) -> None:
        """Let another process use the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read_records(self, prefix: str, kind: type[_Record]) -> list[_Record]:
        """Return the records that `write_record` has written to files with this prefix.

        Raises ConfigError if one is damaged.
        """
        return [_read_record(path, kind) for path in self._path.glob(f"{prefix}*.json")]

    def write_record(self, name: str, record: msgspec.Struct) -> None:
        """Write a record, in place of an earlier one of this name. A kill leaves one of the two."""
        part = self._path / f"{name}.part"
        with open(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, _PRIVATE), "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path / f"{name}.json")

    def drop_record(self, name: str) -> None:
        """Remove a record. Nothing happens if there is none."""
        (self._path / f"{name}.json").unlink(missing_ok=True)

    def begin(self, num_batches: int, unfinished: Iterable[str]) -> None:
        """Add the batches to the folder's size, and remove half-written uploads and records of a killed process.

        Args:
            num_batches: Number of batches.
            unfinished: Ids of files that are not visible yet, but are to be continued; a missing one is created.
        """
        kept = set(unfinished)
        self._num_bytes += num_batches * ENTRY_BYTES
        for path in (*self._path.glob("file-*.jsonl"), *self._path.glob("*.part")):
            if path.stem not in kept and path.stem not in self._files:
                path.unlink()
        for file_id in kept:
            self.open_to_append(file_id).close()
            self._num_bytes += ENTRY_BYTES + self.content(file_id).stat().st_size

    def grow(self, num_bytes: int) -> None:
        """Count bytes that are to be written, or that a new entry takes. Raises FolderFull if there is no room."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise FolderFull(
                f"there is no room for {num_bytes} bytes: the server keeps at most {self._max_bytes} bytes of "
                "files and batches (--batch-dir-size); delete files"
            )
        self._num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Give back bytes that `grow` has counted."""
        self._num_bytes -= num_bytes

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._path / f"{file_id}.jsonl"

    def open_to_append(self, file_id: str) -> BinaryIO:
        """Return a file opened to append, which is created if it is missing."""
        return open(os.open(self.content(file_id), os.O_CREAT | os.O_APPEND | os.O_WRONLY, _PRIVATE), "ab")

    def publish(self, file_id: str, owner: str, filename: str, purpose: str) -> FileRecord:
        """Make a file visible whose content is complete and counted; return its record. Idempotent."""
        size = self.content(file_id).stat().st_size
        record = FileRecord(owner, file_id, size, int(time.time()), filename, purpose)
        self.write_record(file_id, record)
        self._files[file_id] = record
        return record

    def drop_unpublished(self, file_id: str) -> None:
        """Remove the content of a file that was never visible, and its entry."""
        path = self.content(file_id)
        self.shrink(ENTRY_BYTES + path.stat().st_size)
        path.unlink()

    def list_files(self, owner: str) -> list[FileRecord]:
        """Return the files of an owner, the oldest first."""
        return [each for each in self._files.values() if each.owner == owner]

    def find(self, owner: str, file_id: str) -> FileRecord | None:
        """Return a file; None if no such id belongs to this owner."""
        found = self._files.get(file_id)
        return found if found is not None and found.owner == owner else None

    def __contains__(self, file_id: object) -> bool:
        return file_id in self._files

    def delete(self, file_id: str) -> None:
        """Remove the content and the description of a visible file, and give back its bytes."""
        found = self._files.pop(file_id)
        self.drop_record(file_id)
        self.content(file_id).unlink(missing_ok=True)
        self.shrink(ENTRY_BYTES + found.bytes)


def _read_record(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        message = f"{path} is damaged ({error}): move it out of the folder of --batch-dir to start without it"
        raise ConfigError(message) from None


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{secrets.token_hex(16)}"


def copy_content(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file's content, and wait until it is on the disk. Any thread."""
    shutil.copyfileobj(source, target, _PART_BYTES)
    target.flush()
    os.fsync(target.fileno())
