"""Drafters guess the next tokens of a sequence; the device verifies the guesses. Used on the loop thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from inflight.core.request.draft_length import DraftLength, DraftTrials
from inflight.core.request.head_drafts import HeadDrafts
from inflight.core.request.prompt_lookup import PromptLookup
from inflight.core.request.request import Request
from inflight.core.request.suffix_decoding import SuffixDecoding, SuffixTree
from inflight.parameter_spec import Speculation


class Drafter(Protocol):
    """Guesses the next tokens of one sequence.

    Attributes:
        length: The length that the next draft should have at most, if drafts take time from other sequences.
    """

    length: DraftLength

    def append(self, token_ids: Iterable[int]) -> None:
        """Take account of new tokens of the sequence, which are final."""
        ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that may come next."""
        ...


class Drafters:
    """Makes the drafters of sequences, which depend only on the requests and on the tokens generated so far.

    With a draft head, some sequences get none, depending on how useful the head was for earlier sequences.

    Args:
        speculation: The method of the server; None: prompt lookup for the requests that ask for drafts.
        has_useful_head: Whether a draft head can save time; otherwise a method by the head drafts nothing.
    """

    def __init__(self, speculation: Speculation | None, has_useful_head: bool = False) -> None:
        self._speculation = speculation
        self._drafts_nothing = speculation is not None and speculation.has_head and not has_useful_head
        self._trials = DraftTrials()
        self._answers = SuffixTree()  # recent answers of requests without a salt

    def with_default(self, request: Request) -> Request:
        """Return the request with the server's number of draft tokens, unless it asks for drafts itself.

        Requests with beams have no drafts. Those that return logits or additional outputs keep one token in each
        iteration, for which the sizes of their responses were computed.
        """
        output, speculation = request.output, self._speculation
        if (
            speculation is None
            or self._drafts_nothing
            or request.prompt_lookup_num_tokens
            or request.draft is not None
            or request.sampling.uses_beams
            or output.return_generation_logits
            or output.additional_outputs
        ):
            return request
        return replace(request, prompt_lookup_num_tokens=speculation.num_tokens)

    def make(self, request: Request, tokens: list[int]) -> Drafter | None:
        """Return the drafter of a sequence; None without drafts.

        Args:
            request: The sequence's request, with the default.
            tokens: All tokens of the sequence, to which its owner appends new ones.
        """
        most = request.prompt_lookup_num_tokens
        if not most or self._drafts_nothing:
            return None
        method = Speculation.PROMPT_LOOKUP if self._speculation is None else self._speculation.method
        if self._speculation is not None and self._speculation.has_head:
            return HeadDrafts(most, self._trials) if self._trials.begin_sequence() else None
        if method == Speculation.PROMPT_LOOKUP:
            return PromptLookup(tokens, most)
        has_salt = request.identity.cache_salt_id != 0
        return SuffixDecoding(tokens, most, None if has_salt else self._answers)
