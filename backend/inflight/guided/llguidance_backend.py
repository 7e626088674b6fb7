"""Guided decoding with llguidance, which uses derivatives of regular expressions and an Earley parser.

Both are lazy: little is compiled in advance. The library's counters limit the work of one call.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import DeadEnd, MaskJob, Matcher, over_budget, refusal
from inflight.guided.schemas import followed_schema
from inflight.guided.schemas.distinct import EqualItems, ItemWatch, Places
from inflight.guided.structural_tags import as_lark, read_tags
from inflight.guided.vocabulary import GuideVocabulary
from inflight.processors import Processors

_ANY_JSON = '{"type": ["object", "array"]}'

_MAX_LEXER_FUEL = 100_000
"""Maximum number of derivatives of regular expressions per call, about 7 ms. The library raises an error
beyond."""


def _most_items(vocab_size: int) -> int:
    """Return how many Earley items the library may make for one mask; beyond this number it raises an error."""
    return 10_000 + vocab_size // 4


_OVER_BUDGET = re.compile("too many items|too many expressions|current row has [0-9]+ items", re.IGNORECASE)
"""The library's messages for an exceeded limit."""

_OPTIONS = '%llguidance {"no_forcing": true}\n'
_NO_OPTIONS = "%llguidance {}"


class _VocabularyTokenizer:
    """A vocabulary in the form that `llguidance.TokenizerWrapper` expects."""

    bos_token_id = None

    def __init__(self, vocabulary: GuideVocabulary) -> None:
        self.tokens = vocabulary.spelled()
        self.special_token_ids = vocabulary.without_text()
        self.eos_token_id = vocabulary.end_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no ids. The library calls this for text that a guide forces, but guides here never force text."""
        return []


class LLMatcher:
    """A matcher of llguidance. After an error, every call fails.

    Args:
        matcher: The library's matcher.
        tokens: The bytes of every token.
        watch: Enforces `uniqueItems`; None if the guide does not have this keyword.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, tokens: Sequence[bytes] = (), watch: ItemWatch | None = None
    ) -> None:
        self.matcher = matcher
        self.watch = watch
        self._tokens = tokens

    def consume(self, token_ids: Sequence[int]) -> None:
        if token_ids and not self.matcher.consume_tokens(list(token_ids)):
            raise _failure(self.matcher, f"it does not allow the tokens {list(token_ids)}")
        if self.watch is not None:
            for place, token_id in enumerate(token_ids):
                try:
                    self.watch.read(self._tokens[token_id])
                except EqualItems:
                    self.watch.take_back(place)
                    self.matcher.rollback(len(token_ids))
                    raise _equal_items() from None
                except RecursionError:
                    raise refusal(
                        "the text is nested too deeply to compare items, and uniqueItems is true"
                    ) from None

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)
        if self.watch is not None:
            self.watch.take_back(num_tokens)

    @property
    def failure(self) -> InvalidArgument | None:
        """Return the error if the guide no longer works, else None."""
        return _failure(self.matcher) if self.matcher.is_error() else None

    def fork(self) -> LLMatcher:
        return LLMatcher(self.matcher.deep_copy(), self._tokens, self.watch and self.watch.copy())


class LLGuidanceBackend:
    """Compiles guides to matchers with llguidance; a `GuideBackend`."""

    def __init__(self, vocabulary: GuideVocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_VocabularyTokenizer(vocabulary))
        )
        self._limits = llguidance.LLParserLimits(
            step_lexer_fuel=_MAX_LEXER_FUEL,
            step_max_items=_most_items(len(vocabulary.tokens)),
            verbose_errors=False,
        )
        self._executor = llguidance.LLExecutor(Processors.here().num_threads)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        """The tokens with text in the order of their bytes, and their ids; used for `uniqueItems` alone."""
        return sorted((token, index) for index, token in enumerate(self._vocabulary.tokens) if token)

    def compile(self, guide: Guide) -> bytes:
        """Translate the guide to llguidance's grammar, and check it by computing its first mask."""
        grammar = _unforced(self._grammar(guide))
        try:
            self._prove(grammar)
        except InvalidArgument:
            if guide.type is GuideKind.STRUCTURAL_TAG:
                self._blame(guide)
            raise
        return grammar.encode()

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        """Make a matcher of the grammar; the GIL is released meanwhile."""
        # In JSON the keyword may also be spelled with an escape.
        is_named = "uniqueItems" in guide.text or "\\u" in guide.text
        is_watched = guide.type is GuideKind.JSON_SCHEMA and is_named
        watch = None
        if is_watched:
            watch = ItemWatch(Places(guide.text))
            _ = self._sorted  # sorted here and not on the loop thread
        return LLMatcher(self._matcher(compiled.decode()), self._vocabulary.tokens, watch)

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill the masks without the GIL, then ban tokens that would complete an equal item."""
        matchers = [job.matcher for job in jobs]
        own = [each for each in matchers if isinstance(each, LLMatcher)]
        assert len(own) == len(jobs), "matchers of another backend"
        address, stride = masks.ctypes.data, masks.strides[0]
        if len(own) == 1:
            own[0].matcher.unsafe_compute_mask_ptr(address + jobs[0].row * stride, stride)
        else:
            rows = [(each.matcher, job.row) for each, job in zip(own, jobs)]
            self._executor.unsafe_compute_mask_ptr(rows, address, stride, len(masks))
        errors: dict[int, InvalidArgument] = {}
        for index, (each, job) in enumerate(zip(own, jobs)):
            failure = each.failure
            if failure is None and each.watch is not None:
                failure = self._ban(each.watch.banned(), masks[job.row])
            if failure is not None:
                errors[index] = failure
        return errors

    def _ban(self, beginnings: Sequence[bytes], mask: NDArray[np.int32]) -> InvalidArgument | None:
        """Ban all tokens with these beginnings; return an error if no other token is left."""
        words = mask.view(np.uint32)
        for beginning in beginnings:
            place = bisect_left(self._sorted, (beginning, 0))
            while place < len(self._sorted) and self._sorted[place][0].startswith(beginning):
                token_id = self._sorted[place][1]
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
                place += 1
        return _equal_items() if beginnings and not words.any() else None

    def _prove(self, grammar: str) -> None:
        matcher = self._matcher(grammar)
        matcher.compute_bitmask()
        _check(matcher)

    def _blame(self, guide: Guide) -> None:
        """Raise the error of the structure at fault, if there is exactly one."""
        for one in read_tags(guide.text).structures:
            for schema in [one.schema] if one.schema else [each.schema for each in one.fields]:
                followed = followed_schema(schema, one.path) if schema else "{}"
                try:
                    self._prove(_unforced(llguidance.LLMatcher.grammar_from_json_schema(followed)))
                except InvalidArgument as error:
                    raise refusal(f"at {one.path}: {error.args[-1]}") from None

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        if warnings := matcher.get_grammar_warnings():
            raise refusal(_explained("; ".join(warnings)))
        return matcher

    def _grammar(self, guide: Guide) -> str:
        try:
            if guide.type is GuideKind.JSON:
                return llguidance.LLMatcher.grammar_from_json_schema(followed_schema(_ANY_JSON))
            if guide.type is GuideKind.JSON_SCHEMA:
                schema = followed_schema(guide.text, is_watched=True)
                return llguidance.LLMatcher.grammar_from_json_schema(schema)
            if guide.type is GuideKind.REGEX:
                return llguidance.LLMatcher.grammar_from_regex(guide.text)
            if guide.type is GuideKind.EBNF_GRAMMAR:
                return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(guide.text))
            return llguidance.LLMatcher.grammar_from_lark(as_lark(guide.text, self._vocabulary))
        except InvalidArgument:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise refusal(_explained(str(error))) from None


def _unforced(grammar: str) -> str:
    """Return the grammar with the library's forcing of tokens switched off.

    Otherwise, where only one text is possible, the library would allow only its own tokenization, and would
    compute the whole text at every step, which takes a second for 60,000 characters.
    """
    if not grammar.lstrip().startswith("{"):
        return _OPTIONS + grammar.removeprefix(_NO_OPTIONS)
    (only,) = json.loads(grammar)["grammars"]
    lark = only.get("lark_grammar")
    return _OPTIONS + (f"start: %json {json.dumps(only['json_schema'])}\n" if lark is None else lark)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise _failure(matcher)


def _failure(matcher: llguidance.LLMatcher, otherwise: str = "") -> InvalidArgument:
    """Return the error of a guide that no longer works, with the library's message, by default `otherwise`."""
    message = matcher.get_error()
    return (
        over_budget()
        if _OVER_BUDGET.search(message)
        else refusal(_explained(message) if message else otherwise)
    )


def _equal_items() -> DeadEnd:
    reason = refusal(
        "the text has reached a place where an array item must equal an earlier one, but uniqueItems is true "
        "there. Leave out uniqueItems and check the answer, or lower minItems"
    )
    return DeadEnd(*reason.args)


def _explained(reason: str) -> str:
    """Return an explanation of the library's reason, followed by the library's own message."""
    for sign, meaning in _MEANINGS.items():
        if sign in reason:
            # What follows a line like this is the grammar that was made from the guide.
            found = _EXPRESSION_ERROR.search(reason)
            return f"{meaning} (llguidance: {found[1] if found else reason})"
    return f"llguidance reports: {reason}"


_EXPRESSION_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)

_MEANINGS = {
    "are not disjoint": "two patternProperties may match one name, which cannot be followed",
    "patternProperty": "patternProperties are too complex to be distinguished",
    "circular references": "a recursive $ref must not have other keywords beside it",
    "Unsatisfiable": "no text fits it, as its parts contradict each other",
    "does not contain a multiple": "no text fits it, as its parts contradict each other",
    "too many digits": "multipleOf may have at most nine digits",
    "lookarounds": "^, $ and \\b are followed only at the ends of a regular expression",
    "look-around": "look-ahead and look-behind cannot be followed",
    "backreferences": "back references cannot be followed",
    "nested parentheses": "a regular expression, or what is written for not, is nested too deeply",
    "regex parse error": "it has an invalid regular expression",
    "too large": "it is too large",
    "too many": "it is too large",
    "Unable to determine if regex is empty": "its pattern, format and length together are too complex",
    "stack level": "it is nested too deeply, or its parts refer to each other",
}
"""The meaning for the client of each of the library's messages, by a part of the message."""
