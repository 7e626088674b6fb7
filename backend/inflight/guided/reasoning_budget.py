"""A guide that bounds a model's reasoning, and may have another guide for the answer after it.

    {"reasoning": {"begin": "<think>", "end": "</think>", "max_tokens": 200},
     "guide": {"type": "json_schema", "guide": "{…}"}}

This is a guide of type structural_tag. The text is free until its reasoning has `max_tokens` tokens; then `end`
is the only text allowed. After `end` the text is free again, or follows `guide`. Without `begin`, the text
begins with reasoning, as `guide` requires; with it, a text that begins otherwise has no reasoning and is
free. Works with every grammar library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher, refusal
from inflight.guided.vocabulary import GuideVocabulary
from inflight.json_values import is_object

_ALL = -1
"""A word of a mask that allows every token."""
_MAX_TEXTS, _MAX_PREFIXES = 32, 1024
"""Number of texts that end reasoning, and of their beginnings, whose tokens are known at the same time."""
_MAX_SPACE = 2
"""Characters of white space allowed between `end` and an answer with a guide."""
_ANY_SPACE = b"  \n\n "
"""A text that has all of _SPACES."""
_SPACES = (b" ", b"\n", b"  ", b" \n", b"\n ", b"\n\n")


@dataclass(frozen=True, slots=True)
class ReasoningGuide:
    """A guide that bounds the model's reasoning, after parsing.

    Attributes:
        begin: The text that opens reasoning; b"": the text begins with reasoning.
        end: The text that ends it.
        max_tokens: Largest number of tokens of the reasoning, before `end`.
        answer: The guide of the text after `end`; None if it is free.
    """

    begin: bytes
    end: bytes
    max_tokens: int
    answer: Guide | None

    @classmethod
    def read(cls, guide: Guide) -> ReasoningGuide | None:
        """Return the guide; None if it has another form. Raises InvalidArgument if a value is wrong."""
        if guide.type is not GuideKind.STRUCTURAL_TAG or '"reasoning"' not in guide.text:
            return None
        try:
            given: Any = json.loads(guide.text)
        except (ValueError, RecursionError):
            return None
        if not is_object(given) or "reasoning" not in given:
            return None
        try:
            return cls._read(**given)
        except (TypeError, KeyError, ValueError) as error:
            raise refusal(f"a guide with reasoning has another form: {error!r}") from None

    @classmethod
    def _read(cls, reasoning: Any, guide: Any = None) -> ReasoningGuide:
        def read(end: str, max_tokens: int, begin: str = "") -> ReasoningGuide:
            if type(max_tokens) is not int or max_tokens < 0 or not end or (begin and guide is not None):
                raise ValueError(f"max_tokens {max_tokens!r}, begin {begin!r}, end {end!r}")
            answer = None if guide is None else Guide(GuideKind(guide["type"]), guide.get("guide", ""))
            return cls(begin.encode(), end.encode(), max_tokens, answer)

        return read(**reasoning)


@dataclass(frozen=True, slots=True)
class _ReasoningState:
    """How far a text has come.

    Attributes:
        place: before, inside, closing, space or after.
        text: Before: the text so far. Inside: the longest end of it that is a beginning of `end`. Closing: the
            part of `end` that is still to come. Space: the white space after `end`.
        count: Number of tokens of the reasoning.
    """

    place: str
    text: bytes = b""
    count: int = 0


class ReasoningMatcher:
    """A matcher of a text with reasoning, then of the answer.

    Args:
        guide: The guide.
        tokens: The bytes of every token, special tokens as they are spelled.
        answer: Matcher of the text after the reasoning; None if it is free.
    """

    def __init__(self, guide: ReasoningGuide, tokens: Sequence[bytes], answer: Matcher | None) -> None:
        self._guide = guide
        self._tokens = tokens
        self.answer = answer
        first = _ReasoningState("before") if guide.begin else self._inside(_ReasoningState("inside"))
        self._states = [first]

    @property
    def guide_end(self) -> bytes:
        """The text that ends the reasoning."""
        return self._guide.end

    @property
    def state(self) -> _ReasoningState:
        """The state after the last token."""
        return self._states[-1]

    @property
    def follows_answer(self) -> bool:
        """Whether the next token is one of the answer, which has a guide."""
        return self.answer is not None and self.state.place in ("space", "after")

    def consume(self, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids):
            try:
                self._states.append(self._next(token_id))
            except InvalidArgument:
                self.rollback(place)
                raise

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            if self._states.pop().place == "after" and self.answer is not None:
                self.answer.rollback(1)

    def fork(self) -> ReasoningMatcher:
        answer = None if self.answer is None else self.answer.fork()
        forked = ReasoningMatcher(self._guide, self._tokens, answer)
        forked._states = [*self._states]
        return forked

    def _next(self, token_id: int) -> _ReasoningState:
        """Return the state after one more token."""
        state, guide = self.state, self._guide
        added = self._tokens[token_id] if token_id < len(self._tokens) else b""
        if state.place == "before":
            text = (state.text + added).lstrip()
            if text.startswith(guide.begin):
                return self._inside(_ReasoningState("inside", text[len(guide.begin) :]))
            return _ReasoningState("before" if guide.begin.startswith(text) else "after", text)
        if state.place == "inside":
            return self._inside(_ReasoningState("inside", state.text + added, state.count + 1))
        if state.place == "closing":
            if not added or not state.text.startswith(added):
                raise refusal(f"the reasoning has reached its budget, and token {token_id} does not end it")
            rest = state.text[len(added) :]
            return _ReasoningState("closing", rest) if rest else self._behind()
        is_space = state.place == "space" and added in _SPACES and len(state.text + added) <= _MAX_SPACE
        if is_space:
            return _ReasoningState("space", state.text + added)
        if self.answer is not None:
            self.answer.consume((token_id,))
        return _ReasoningState("after")

    def _inside(self, state: _ReasoningState) -> _ReasoningState:
        """Return the state, or the one that follows if the reasoning ends here."""
        end = self._guide.end
        if end in state.text:
            return self._behind()
        known = next(size for size in range(len(end) - 1, -1, -1) if state.text.endswith(end[:size]))
        if state.count >= self._guide.max_tokens:
            return _ReasoningState("closing", end[known:])
        return replace(state, text=end[:known])

    def _behind(self) -> _ReasoningState:
        return _ReasoningState("after" if self.answer is None else "space")


class ReasoningBackend:
    """Adds this module's guides to a grammar library; a `GuideBackend`.

    Args:
        library: The library.
        vocabulary: Its vocabulary.
    """

    def __init__(self, library: GuideBackend, vocabulary: GuideVocabulary) -> None:
        self._library = library
        self._vocabulary = vocabulary
        # Clients choose the texts, so the caches are bounded.
        self._ids_within = lru_cache(_MAX_TEXTS)(self._find_within)
        self._with_byte = lru_cache(_MAX_TEXTS)(self._find_with_byte)
        self._banned = lru_cache(_MAX_PREFIXES)(self._find_banned)

    def compile(self, guide: Guide) -> bytes:
        """Compile the guide of the answer, or a guide of another form."""
        if (own := ReasoningGuide.read(guide)) is not None:
            return b"" if own.answer is None else self._library.compile(own.answer)
        return self._library.compile(guide)

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        """Return a matcher of a guide, with what `compile` returned for it."""
        if (own := ReasoningGuide.read(guide)) is None:
            return self._library.load(guide, compiled)
        self._ids_within(own.end)  # searched here and not on the loop thread
        self._ids_within(_ANY_SPACE)
        self._with_byte(own.end[-1])
        answer = None if own.answer is None else self._library.load(own.answer, compiled)
        return ReasoningMatcher(own, self._vocabulary.tokens, answer)

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill the masks: those of reasoning here, all others by the library."""
        asked: list[int] = []  # indexes of the jobs for the library
        for index, job in enumerate(jobs):
            matcher = job.matcher
            if not isinstance(matcher, ReasoningMatcher) or matcher.follows_answer:
                asked.append(index)
            else:
                self._fill_reasoning(matcher, masks[job.row])
        if not asked:
            return {}
        errors = self._library.fill([_of_library(jobs[index]) for index in asked], masks)
        for index in asked:
            matcher = jobs[index].matcher
            if isinstance(matcher, ReasoningMatcher) and matcher.state.place == "space":
                for space in _SPACES:
                    if len(matcher.state.text + space) <= _MAX_SPACE:
                        _allow(masks[jobs[index].row], self._ids_within(_ANY_SPACE).get(space, ()))
        return {asked[place]: error for place, error in errors.items()}

    def _fill_reasoning(self, matcher: ReasoningMatcher, mask: NDArray[np.int32]) -> None:
        state = matcher.state
        if state.place == "closing":
            mask[:] = 0
            ids, sizes = self._ids_within(matcher.guide_end), range(len(state.text), 0, -1)
            _allow(mask, next((ids[begin] for size in sizes if (begin := state.text[:size]) in ids), ()))
            return
        mask[:] = _ALL
        if matcher.answer is not None:
            # tokens that end the text, or begin the answer in the reasoning's last one
            _forbid(mask, (self._vocabulary.end_id, *self._banned(matcher.guide_end, len(state.text))))

    def _find_within(self, text: bytes) -> Mapping[bytes, tuple[int, ...]]:
        """Return the ids of the tokens that are a part of a text, by their bytes."""
        found: dict[bytes, tuple[int, ...]] = {}
        for index, token in enumerate(self._vocabulary.tokens):
            if token and token in text:
                found[token] = (*found.get(token, ()), index)
        return found

    def _find_with_byte(self, byte: int) -> tuple[int, ...]:
        """Return the ids of the tokens that have a byte."""
        return tuple(index for index, token in enumerate(self._vocabulary.tokens) if byte in token)

    def _find_banned(self, end: bytes, known: int) -> tuple[int, ...]:
        """Return the tokens with text after `end`, of which the first `known` bytes are generated already."""
        rest, found = end[known:], list[int]()
        for index in self._with_byte(end[-1]):
            token = self._vocabulary.tokens[index]
            goes_on = token.startswith(rest) and len(token) > len(rest)
            if goes_on or (end in token and not token.endswith(end)):
                found.append(index)
        return tuple(found)


def _of_library(job: MaskJob) -> MaskJob:
    matcher = job.matcher
    if isinstance(matcher, ReasoningMatcher):
        assert matcher.answer is not None, "the answer has a guide"
        return MaskJob(matcher.answer, job.row)
    return job


def _allow(mask: NDArray[np.int32], ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for index in ids:
        words[index // 32] |= np.uint32(1 << index % 32)


def _forbid(mask: NDArray[np.int32], ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for index in ids:
        words[index // 32] &= ~np.uint32(1 << index % 32)
