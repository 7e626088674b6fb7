"""Paths with non-ASCII letters, in an interpreter that treats file names as ASCII.

Triton's Python stub starts its interpreter without a locale, whatever the environment says. Python then
represents the bytes of non-ASCII letters in file names by surrogates, and cannot open a path with the
letters themselves. `native` converts text from other sources (config.pbtxt, another process) to a file name;
`readable` converts file names to readable text. In other interpreters both return their argument unchanged.
"""

from __future__ import annotations

import os


def native(path: str | os.PathLike[str]) -> str:
    """Return the path in the form that this process can open; a path in this form is returned unchanged."""
    return os.fsdecode(os.fspath(path).encode("utf-8", "surrogateescape"))


def readable(text: str) -> str:
    """Return a text in which file names are readable. Undecodable characters are replaced by "?"."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:  # an unpaired UTF-16 surrogate from JSON, or a file name that is not UTF-8
        return text.encode("utf-8", "replace").decode()
