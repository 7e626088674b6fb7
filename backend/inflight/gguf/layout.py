"""Checks that the keys and values of a GGUF file end within the file, before the package gguf reads them.

It would go through an array of any length that a damaged file states.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each type of numbers."""
_STRING, _ARRAY = 8, 9
_HEADER = struct.Struct("<4sIQQ")
"""GGUF, version, number of tensors, number of keys."""


class DamagedFile(ValueError):
    """The keys and values go on after the end of the file, or a value's type is unknown."""


def check_layout(path: Path) -> None:
    """Raise DamagedFile unless all keys and values end within the file. Files of other formats are not
    checked."""
    with path.open("rb") as file:
        if path.stat().st_size < _HEADER.size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            magic, version, _, num_keys = _HEADER.unpack_from(content)
            if magic != b"GGUF" or version not in (2, 3):
                return
            _Walk(content).pass_keys(num_keys)


class _Walk:
    """A position in a file, which moves from value to value."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, _HEADER.size

    def pass_keys(self, count: int) -> None:
        for _ in range(count):
            self._pass_string()
            self._pass_value(self._number("<I"))

    def _pass_value(self, kind: int) -> None:
        if kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind in _SIZES:
                self._move(_SIZES[kind] * count)
                return
            for _ in range(count):
                self._pass_value(kind)
        elif kind == _STRING:
            self._pass_string()
        elif kind in _SIZES:
            self._move(_SIZES[kind])
        else:
            raise DamagedFile(f"a value has the unknown type {kind}")

    def _pass_string(self) -> None:
        self._move(self._number("<Q"))

    def _number(self, form: str) -> int:
        at = self._at
        self._move(struct.calcsize(form))
        return struct.unpack_from(form, self._content, at)[0]

    def _move(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._content):
            raise DamagedFile("the file ends before its keys and values do")
