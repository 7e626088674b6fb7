"""Text that is passed on while it comes, but for white space that may have to be left out.

Does not know what the text is part of. One object a text, used by one thread at a time.
"""

from __future__ import annotations


class HeldText:
    """Collects text, and keeps white space at its end back until something follows it.

    Args:
        drop_leading: Leave out white space until something else comes.
    """

    def __init__(self, drop_leading: bool = False) -> None:
        self._drop_leading = drop_leading
        self._ready = ""
        self._space = ""

    def add(self, text: str) -> None:
        """Go on with the text."""
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
        """Take the text that can be passed on; each part is returned once."""
        ready, self._ready = self._ready, ""
        return ready

    def take_space(self) -> str:
        """The white space that is kept back, where the text has ended with it; it is returned once."""
        space, self._space = self._space, ""
        return space

    def cut(self) -> None:
        """Leave out the white space here: what is kept back, and what comes next."""
        self._space = ""
        self._drop_leading = True


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker that is not complete."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
