"""A trace that is read while a server writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inflight.batch_manager.recording import Begin, End, Header, decode


class GrowingTrace:
    """What is added to a trace, read as it comes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new_records(self, containing: bytes = b"") -> Iterator[Begin | End]:
        """Complete ones since the last call; only those whose lines contain these bytes are decoded."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            if containing in line and not isinstance(record := decode(line), Header):
                yield record
