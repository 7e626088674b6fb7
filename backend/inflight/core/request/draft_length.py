"""How long the drafts of a sequence should be, by how many of its earlier draft tokens were accepted."""

from __future__ import annotations

_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Numbers of tokens without drafts after a draft of one token was rejected: at first, and at most."""


class DraftLength:
    """A maximum length of a sequence's drafts that follows how many of the earlier ones were accepted.

    A draft that is accepted as a whole doubles it, and one that is rejected as a whole halves it. Otherwise the
    next draft is one token longer than what was accepted. After a rejected draft of one token there are no drafts
    for a while, and longer each time, so that useless drafts cost almost nothing.

    Args:
        most: The request's maximum.

    Attributes:
        most: The request's maximum.
    """

    def __init__(self, most: int) -> None:
        self.most = self._length = most
        self._num_left = 0  # tokens until the next draft
        self._next_pause = _FIRST_PAUSE

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of the next draft; 0: no draft."""
        return 0 if self._num_left > 0 else self._length

    def advance(self, num_tokens: int) -> None:
        """Count tokens that the sequence got."""
        self._num_left -= num_tokens

    def verified(self, num_tokens: int, num_accepted: int) -> None:
        """Take account of a draft of `num_tokens` tokens, of which the first `num_accepted` were accepted."""
        if num_accepted == num_tokens:
            self._length = max(self._length, min(self.most, 2 * num_tokens))
        elif num_accepted:
            self._length = num_accepted + 1
        elif self._length > 1:
            self._length //= 2
        else:
            self._num_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        if num_accepted:
            self._next_pause = _FIRST_PAUSE
