"""Streamed text whose trailing white space is held until its fate is known.

Does not know what the text is part of. One object for each text, used by one thread at a time.
"""

from __future__ import annotations


class HeldText:
    """Buffer for a streamed text that holds trailing white space until other characters follow.

    Args:
        drop_leading: Drop leading white space.
    """

    def __init__(self, drop_leading: bool = False) -> None:
        self._drop_leading = drop_leading
        self._ready = ""
        self._space = ""

    def add(self, text: str) -> None:
        """Add the next part of the text; white space at its end is held back."""
        if self._drop_leading:
            text = text.lstrip()
        if not text:
            return
        self._drop_leading = False
        shown = text.rstrip()
        if shown:
            self._ready += self._space + shown
            self._space = ""
        self._space += text[len(shown) :]

    def take(self) -> str:
        """Return the text that is ready, once."""
        ready, self._ready = self._ready, ""
        return ready

    def take_space(self) -> str:
        """Return the held white space at the end of the text, once."""
        space, self._space = self._space, ""
        return space

    def cut(self) -> None:
        """Drop the held white space, and white space that follows."""
        self._space = ""
        self._drop_leading = True


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the text's end may begin a marker; at most one less than its length."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
