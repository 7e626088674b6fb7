"""Paths with letters outside ASCII, in an interpreter that takes file names for ASCII.

Triton's Python stub starts its interpreter without a locale, whatever the environment says, so that Python cannot
open a path with such letters by its text: it knows them as the bytes they are, spelled with surrogates. Text that
came from elsewhere (config.pbtxt, another process) becomes a file name by `native`, and what is to be read by
somebody becomes text again by `readable`. In any other interpreter both change nothing. Pure.
"""

from __future__ import annotations

import os


def native(path: str | os.PathLike[str]) -> str:
    """Return the path as this process can open it; one that it can open already stays as it is."""
    return os.fsdecode(os.fspath(path).encode("utf-8", "surrogateescape"))


def readable(text: str) -> str:
    """The text with file names in it as a person, or another process, spells them; "?" for what is no text."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:  # half a pair of UTF-16, of somebody's JSON, or a file's name that is not UTF-8
        return text.encode("utf-8", "replace").decode()
