"""Text of requests to token ids: prompts, and the words to ban, to bias or to stop at.

Owns nothing but the choice of the tokenizer. Runs on the thread that calls execute, or for long texts on one of
those beside it, with the GIL released while a text is being tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.errors import Unsupported
from inflight.serving.completion_text import TokenizerFinder
from inflight.text.tokenizer import Tokenizer
from inflight.text.words import biased_ids, word_ids

Words = tuple[tuple[int, ...], ...]


class TextEncoder(Protocol):
    """What requests need of a tokenizer; every call raises Unsupported where the model has none."""

    def prompts(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Ids of each prompt, with the special tokens that belong around it."""

    def max_bytes_per_token(self) -> int | None:
        """The most bytes of UTF-8 text that one token can stand for; None if there is no bound."""

    def tokens(self, word: str) -> Sequence[int]:
        """Ids that a bias for a word adds to, each as often as it is there."""

    def spellings(self, word: str) -> Words:
        """The ids of a word in every way in which it is likely to stand in a text."""


class ModelTextEncoder:
    """The tokenizer of a served model."""

    def __init__(self, tokenizers: TokenizerFinder, engine_directory: str) -> None:
        self._tokenizers = tokenizers
        self._engine_directory = engine_directory

    def prompts(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """See TextEncoder."""
        return self._tokenizer().encode_batch(texts, add_special_tokens=True)

    def max_bytes_per_token(self) -> int | None:
        """See TextEncoder."""
        return self._tokenizer().max_bytes_per_token

    def tokens(self, word: str) -> Sequence[int]:
        """See TextEncoder."""
        return biased_ids(self._tokenizer(), word)

    def spellings(self, word: str) -> Words:
        """See TextEncoder."""
        return word_ids(self._tokenizer(), word)

    def _tokenizer(self) -> Tokenizer:
        return self._tokenizers.require(self._engine_directory)


class NoText:
    """For users without a tokenizer: refuses all text."""

    def tokens(self, text: str) -> Sequence[int]:
        """Raises Unsupported."""
        raise _no_tokenizer()

    def prompts(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Raises Unsupported."""
        raise _no_tokenizer()

    def spellings(self, word: str) -> Words:
        """Raises Unsupported."""
        raise _no_tokenizer()

    def max_bytes_per_token(self) -> int | None:
        """Raises Unsupported."""
        raise _no_tokenizer()


def _no_tokenizer() -> Unsupported:
    return Unsupported("there is no tokenizer here: send token ids instead of text")
