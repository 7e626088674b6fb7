"""Guides by llguidance: derivatives of regular expressions and an Earley parser.

Both are lazy: little is compiled ahead, and what a step may take is bounded by the library itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from inflight.core.request.guide import Guide, GuideType
from inflight.errors import InvalidArgument
from inflight.guided.backend import MaskJob, Matcher, refusal
from inflight.guided.schemas import followed_schema
from inflight.guided.structural_tags import as_lark, read_tags
from inflight.guided.vocabulary import GuideVocabulary

_FEW_MASKS = 8
"""Filling so many takes no longer than to wake other threads for it, tens of microseconds each."""

_ANY_JSON = '{"type": ["object", "array"]}'


class _Tokenizer:
    """A vocabulary as `llguidance.TokenizerWrapper` asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: GuideVocabulary) -> None:
        self.tokens = vocabulary.spelled()
        self.special_token_ids = vocabulary.without_text()
        self.eos_token_id = vocabulary.end_id
        hidden = set(self.special_token_ids)
        self._ids = {token: index for index, token in enumerate(self.tokens) if index not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Some ids of a text, the longest token first: the library wants them of what a guide forces."""
        left = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while left:
            sizes = range(min(self._longest, len(left)), 0, -1)
            size = next((size for size in sizes if left[:size] in self._ids), 1)
            ids += [self._ids[left[:size]]] if left[:size] in self._ids else []
            left = left[size:]
        return ids


class LLMatcher:
    """A matcher of llguidance. A matcher in error stays so, and says it."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> None:
        """As `Matcher.consume`."""
        if token_ids and not self.matcher.consume_tokens(list(token_ids)):
            error = self.matcher.get_error()
            raise refusal(_explained(error) if error else f"it does not allow the tokens {list(token_ids)}")

    def fork(self) -> LLMatcher:
        """As `Matcher.fork`."""
        return LLMatcher(self.matcher.deep_copy())


class LLGuidanceBackend:
    """Implements `GuideBackend`."""

    def __init__(self, vocabulary: GuideVocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokenizer(vocabulary)))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._executor = llguidance.LLExecutor(len(os.sched_getaffinity(0)))

    def compile(self, guide: Guide) -> bytes:
        """As `GuideBackend.compile`: the guide as llguidance's own kind of grammar, and its first mask."""
        grammar = self._grammar(guide)
        try:
            self._prove(grammar)
        except InvalidArgument:
            if guide.type is GuideType.STRUCTURAL_TAG:
                self._blame(guide)
            raise
        return grammar.encode()

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        """As `GuideBackend.load`. The GIL is released meanwhile."""
        return LLMatcher(self._matcher(compiled.decode()))

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """As `GuideBackend.fill`, without the GIL: few masks on the caller's thread, many on the library's own."""
        matchers = [job.matcher for job in jobs]
        own = [each.matcher for each in matchers if isinstance(each, LLMatcher)]
        assert len(own) == len(jobs), "matchers of another backend"
        address, stride = masks.ctypes.data, masks.strides[0]
        place = (address, stride, len(masks))
        single = [(matcher, job.row) for matcher, job in zip(own, jobs) if not job.draft]
        if len(single) > _FEW_MASKS:
            self._executor.unsafe_compute_mask_ptr(single, *place)
        else:
            for matcher, row in single:
                matcher.unsafe_compute_mask_ptr(address + row * stride, stride)
        for matcher, job in zip(own, jobs):
            if job.draft:
                self._fill_behind(matcher, job, place)
        return {
            index: refusal(_explained(each.get_error())) for index, each in enumerate(own) if each.is_error()
        }

    def _fill_behind(self, matcher: llguidance.LLMatcher, job: MaskJob, place: tuple[int, int, int]) -> None:
        """Fill the masks of a job with a draft, as far as that is allowed; beyond, a matcher would fail."""
        allowed = list(job.draft[: matcher.validate_tokens(list(job.draft))])
        if allowed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token([(matcher, job.row, allowed)], *place)
        else:
            self._executor.unsafe_compute_mask_ptr([(matcher, job.row)], *place)

    def _prove(self, grammar: str) -> None:
        matcher = self._matcher(grammar)
        matcher.compute_bitmask()
        _check(matcher)

    def _blame(self, guide: Guide) -> None:
        """Raise the error of the structure that is at fault, if one alone is."""
        for one in read_tags(guide.text).structures:
            schema = followed_schema(one.schema, one.path)
            try:
                self._prove(llguidance.LLMatcher.grammar_from_json_schema(schema))
            except InvalidArgument as error:
                reason = str(error).partition(": ")[2]
                raise refusal(f"at {one.path}: {reason}") from None

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        if warnings := matcher.get_grammar_warnings():
            raise refusal(_explained("; ".join(warnings)))
        return matcher

    def _grammar(self, guide: Guide) -> str:
        try:
            if guide.type is GuideType.JSON:
                return llguidance.LLMatcher.grammar_from_json_schema(followed_schema(_ANY_JSON))
            if guide.type is GuideType.JSON_SCHEMA:
                return llguidance.LLMatcher.grammar_from_json_schema(followed_schema(guide.text))
            if guide.type is GuideType.REGEX:
                return llguidance.LLMatcher.grammar_from_regex(guide.text)
            if guide.type is GuideType.EBNF_GRAMMAR:
                return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(guide.text))
            return llguidance.LLMatcher.grammar_from_lark(as_lark(guide.text, self._vocabulary))
        except InvalidArgument:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise refusal(_explained(str(error))) from None


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise refusal(_explained(matcher.get_error()))


def _explained(reason: str) -> str:
    """What a reason of the library means, in front of its own words."""
    for sign, meaning in _MEANINGS.items():
        if sign in reason:
            return f"{meaning} (llguidance: {reason})"
    return f"llguidance, which follows it, says: {reason}"


_MEANINGS = {
    "are not disjoint": "two patternProperties may match one name, which cannot be followed",
    "patternProperty": "patternProperties are too complex to be told apart",
    "circular references": "a $ref that comes back to itself may have no keywords beside it",
    "Unsatisfiable": "no text fits it, as its parts contradict each other",
    "does not contain a multiple": "no text fits it, as its parts contradict each other",
    "too many digits": "multipleOf may have at most nine digits",
    "lookarounds": "^, $ and \\b are followed only at the ends of a regular expression",
    "look-around": "look-ahead and look-behind cannot be followed",
    "backreferences": "back references cannot be followed",
    "regex parse error": "it has something that is no regular expression",
    "too large": "it is too large",
    "too many": "it is too large",
    "Unable to determine if regex is empty": "its pattern, format and length together are too complex",
    "stack level": "it is nested too deeply, or its parts refer to each other",
}
"""By a part of the library's reason, what it means for who has sent the guide."""
