"""Drafts by a draft head, the checkpoint's own or one with a folder of its own, which the device computes."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.core.request.draft_length import DraftLength, DraftTrials

GUESSED_ON_DEVICE = -1
"""Stands in a batch for a draft token that the device guesses itself, at the start of the forward pass."""


class HeadDrafts:
    """A drafter that decides only how many tokens are guessed; the device guesses them.

    Args:
        most: Maximum number of tokens of a draft.
        trials: Told whether the drafts saved time.

    Attributes:
        length: The length that the next draft should have at most, if drafts take time from other sequences.
    """

    def __init__(self, most: int, trials: DraftTrials) -> None:
        self.length = DraftLength(most, trials)

    def append(self, token_ids: Iterable[int]) -> None:
        """Take account of new tokens of the answer, which are final."""
        self.length.advance(sum(1 for _ in token_ids))

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return a draft of `max_tokens` placeholders, which the device replaces by its guesses."""
        return (GUESSED_ON_DEVICE,) * max_tokens
