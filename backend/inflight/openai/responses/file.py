"""The file in which kept responses outlive the process: an SQLite database, which only this process uses.

Responses that have ended are written by a thread, in the order of the calls, so that the event loop never waits
for the disk. If a write fails, the response is in memory only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from inflight.errors import ConfigError

_log = logging.getLogger(__name__)
_PRIVATE = 0o600
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, owner BLOB, id TEXT, response BLOB, items BLOB, output BLOB, UNIQUE (owner, id))"""
_ITEMS = msgspec.msgpack.Decoder(list[bytes])


def is_in_use(path: Path) -> bool:
    """Return whether a process uses the file, which need not exist. Makes no file."""
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0)
        with contextlib.closing(database):
            database.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.Error as error:
        return "locked" in str(error)
    return False


class ResponseFile:
    """Responses that have ended, by owner and id.

    Args:
        path: The file, which is created if it is missing.

    Raises:
        ConfigError: The file cannot be used, is not such a database, or another server uses it.
    """

    def __init__(self, path: Path) -> None:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, _PRIVATE))
            self._database = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(_TABLE)
            self._database.execute("PRAGMA user_version = 1")  # takes the lock
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--response-store {path}: it cannot be used ({reason})") from None
        self._writer = ThreadPoolExecutor(1, "response-store")
        self._has_failed = False

    def read(self) -> Iterator[tuple[bytes, str, bytes, list[bytes], list[bytes]]]:
        """Yield (owner, id, response, items, output) of each response, the oldest first. Before any other call."""
        rows = self._database.execute(
            "SELECT owner, id, response, items, output FROM responses ORDER BY number"
        )
        for owner, response_id, response, items, output in rows:
            yield owner, response_id, response, _ITEMS.decode(items), _ITEMS.decode(output)

    def put(
        self, owner: bytes, response_id: str, response: bytes, items: Sequence[bytes], output: Sequence[bytes]
    ) -> None:
        """Write a response, in place of an earlier one."""

        def write() -> None:
            packed = (msgspec.msgpack.encode(list(items)), msgspec.msgpack.encode(list(output)))
            self._database.execute(
                "INSERT OR REPLACE INTO responses (owner, id, response, items, output) VALUES (?, ?, ?, ?, ?)",
                (owner, response_id, response, *packed),
            )

        self._writer.submit(self._try, write)

    def delete(self, owner: bytes, response_id: str) -> None:
        """Remove a response. Nothing happens if it is not there."""

        def write() -> None:
            self._database.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))

        self._writer.submit(self._try, write)

    def close(self) -> None:
        """Finish what is being written, and let another process use the file. Idempotent."""
        self._writer.shutdown()
        self._database.close()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._has_failed = False
        except sqlite3.Error as error:
            if not self._has_failed:  # once until a write succeeds again
                _log.error("responses are kept in memory only: the store cannot be written (%s)", error)
            self._has_failed = True
