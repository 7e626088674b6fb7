"""A buffer for streamed text that holds back trailing white space.

There is one buffer for each text; it is used by one thread at a time.
"""

from __future__ import annotations


class HeldText:
    """Buffer for a streamed text that holds trailing white space until other characters follow.

    Args:
        drop_leading: Whether to drop leading white space.

    Attributes:
        length: Number of characters that have become ready so far, taken ones included.
    """

    def __init__(self, drop_leading: bool = False) -> None:
        self._drop_leading = drop_leading
        self._ready = ""
        self._space = ""
        self.length = 0

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
            self.length += len(self._space) + len(shown)
            self._space = ""
        self._space += text[len(shown) :]

    def take(self) -> str:
        """Remove the text that is ready from the buffer and return it."""
        ready, self._ready = self._ready, ""
        return ready

    def take_space(self) -> str:
        """Remove the white space at the end of the text from the buffer and return it."""
        space, self._space = self._space, ""
        return space

    def cut(self) -> None:
        """Drop the held white space, and white space that follows."""
        self._space = ""
        self._drop_leading = True


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`, but not the whole marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
