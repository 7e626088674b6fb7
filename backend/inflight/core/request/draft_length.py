"""How long the drafts of a sequence should be, by how many of its earlier draft tokens were accepted."""

from __future__ import annotations

_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Numbers of tokens without drafts after a draft of one token was rejected: at first, and at most."""

_FIRST_LENGTH = 2
"""Number of tokens of the first draft."""

_REMEMBERED = 8
"""Number of draft tokens over which the share of accepted ones is averaged."""

_LARGEST_LOSS = 2.5
"""Drafts of a sequence are over when they have cost as much more time than they saved as this many tokens take."""

_MOST_LEFT_OUT = 16
"""Largest number of sequences that get no drafts after a sequence whose drafts ended for good."""


class DraftTrials:
    """Decides which sequences try a draft head, by what drafts cost and saved in earlier sequences.

    After a sequence whose drafts ended for good, the next sequence gets no drafts; after another such sequence the
    next two, then four, and so on. A sequence whose drafts save as much time as could have been lost ends this.
    """

    def __init__(self) -> None:
        self._num_left = 0  # sequences until one tries again
        self._next_pause = 1

    def begin_sequence(self) -> bool:
        """Count a new sequence, and return whether it tries drafts."""
        self._num_left -= 1
        return self._num_left < 0

    def lost(self) -> None:
        """Take account of a sequence whose drafts ended for good."""
        self._num_left, self._next_pause = self._next_pause, min(2 * self._next_pause, _MOST_LEFT_OUT)

    def gained(self) -> None:
        """Take account of a sequence whose drafts saved time."""
        self._num_left, self._next_pause = 0, 1


class DraftLength:
    """A maximum length of a sequence's drafts that follows how many of the earlier ones were accepted.

    The first draft has two tokens. A draft that is accepted as a whole doubles the length, and one that is
    rejected as a whole halves it. Otherwise the next draft is one token longer than what was accepted. After a
    rejected draft of one token there are no drafts for a while, and longer each time, so that useless drafts
    cost almost nothing.

    Drafts are over when they have cost more time than they saved. A draft head, whose guesses take time, then
    drafts nothing more. Other drafts then have the length of this class even with few sequences.

    Args:
        most: The request's maximum.
        trials: Told once whether the drafts saved time or ended for good; None: not told.

    Attributes:
        most: The request's maximum.
    """

    def __init__(self, most: int, trials: DraftTrials | None = None) -> None:
        self.most = most
        self._trials = trials
        self._length = min(most, _FIRST_LENGTH)
        self._num_left = 0  # tokens until the next draft
        self._num_since = 0  # tokens since the last draft
        self._share = 1.0  # of the latest draft tokens that were accepted
        self._next_pause = _FIRST_PAUSE
        self._gain = 0.0

    @property
    def is_over(self) -> bool:
        """Whether drafts have cost more time than they saved, by more than a few tokens' time."""
        return self._gain <= -_LARGEST_LOSS

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of the next draft; 0: no draft."""
        return 0 if self._num_left > 0 else self._length

    def advance(self, num_tokens: int) -> None:
        """Count tokens that the sequence got."""
        self._num_left -= num_tokens
        self._num_since += num_tokens

    def tokens_if(self, needed_share: float) -> int:
        """Return `tokens`, or 0 if a smaller share of the latest draft tokens was accepted than is needed.

        Then the sequence tries again after its longest pause, unless even accepted tokens save no time.
        """
        is_tried = self._share >= needed_share or self._num_since >= _LONGEST_PAUSE
        return self.tokens if is_tried and needed_share <= 1 else 0

    def spend(self, cost: float) -> None:
        """Take account of time for drafts, relative to the time in which the sequence gets a token."""
        self._gain -= cost
        self._tell_trials()

    def verified(self, num_tokens: int, num_accepted: int) -> None:
        """Take account of a draft of `num_tokens` tokens, of which the first `num_accepted` were accepted."""
        self._num_since = 0
        self._gain += num_accepted
        self._tell_trials()
        self._share += (num_accepted / num_tokens - self._share) * min(1, num_tokens / _REMEMBERED)
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

    def _tell_trials(self) -> None:
        if self._trials is None or abs(self._gain) < _LARGEST_LOSS:
            return
        if self.is_over:
            self._trials.lost()
        else:
            self._trials.gained()
        self._trials = None
