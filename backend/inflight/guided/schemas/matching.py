"""Check whether texts match the regular expressions of a schema, in time that is linear in the text.

The expressions come from a client, so Python's module `re` cannot be used: it needs exponential time for
`^(a+)+$`.
"""

from __future__ import annotations

import json
import re

import llguidance

from inflight.guided.schemas.patterns import UnreadablePattern, is_replaced, rust_patterns

_MAX_FUEL = 200_000
"""Maximum number of derivatives of expressions per text, about 20 ms."""


class _Bytes:
    """A vocabulary of all bytes, in the form that `llguidance.TokenizerWrapper` expects."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([each]) for each in range(256)), b"")

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no token ids. llguidance calls this with text for which an expression allows no alternative."""
        return []


class Matching:
    """Matches texts against Rust expressions. Used by one thread at a time."""

    def __init__(self) -> None:
        self._matchers: dict[str, llguidance.LLMatcher] = {}
        self._tokenizer: llguidance.LLTokenizer | None = None

    def matches(self, expression: str, text: str) -> bool | None:
        """Return whether a Rust expression matches a part of a text.

        Returns None if this is not known, or takes too much work.
        """
        matcher = self._matchers.get(expression)
        if matcher is None:
            matcher = self._matchers[expression] = self._matcher(expression)
        if matcher.is_error():
            return None
        try:
            spelled = list(json.dumps(text, ensure_ascii=False).encode())
        except UnicodeEncodeError:  # an unpaired surrogate
            return None
        num_allowed = matcher.validate_tokens(spelled)
        return None if matcher.is_error() else num_allowed == len(spelled)

    def may_match(self, pattern: str, text: str) -> bool:
        """Return whether a text may match an expression in the syntax of ECMA 262 or of Python."""
        if is_replaced(pattern):
            return True
        is_ascii = all(" " <= char <= "~" for char in text)
        if not is_ascii and (re.search(r"\\|\(\?[ims]", pattern) or not text.isprintable()):
            return True  # the Rust expressions exclude texts for which the two syntaxes differ
        try:
            return all(self.matches(each, text) is not False for each in rust_patterns(pattern))
        except UnreadablePattern:
            return True

    def _matcher(self, expression: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
        schema = json.dumps({"type": "string", "pattern": expression})
        return llguidance.LLMatcher(
            self._tokenizer,
            llguidance.LLMatcher.grammar_from_json_schema(schema),
            log_level=0,
            limits=llguidance.LLParserLimits(
                initial_lexer_fuel=_MAX_FUEL, step_lexer_fuel=_MAX_FUEL, verbose_errors=False
            ),
        )
