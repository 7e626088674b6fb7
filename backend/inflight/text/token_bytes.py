"""Compute the maximum length of text that one token can represent, to refuse too long texts without tokenization.

For this, it computes how much normalizers and models can shrink a text, and which of them can remove text of
any length. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers

from inflight.text.token_decoder import BYTE_OF_CHARACTER, BYTE_TOKENS, Component, described

# The factor by which a normalizer can shrink a text, in UTF-8 bytes. Other normalizers may remove all text.
_SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1}

# Pre-tokenizers that keep all of a text, unless their `behavior` is "Removed".
_KEEP_EVERYTHING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return the maximum number of UTF-8 bytes that one token can represent; None if there is no bound.

    There is no bound if parts of a text may give no token at all, such as spaces beside a token that strips
    them, or if a text of any length may become a single unknown token.
    """
    shrinks = _shrinks(described(backend.normalizer, "normalizers"))
    cuts = described(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    if shrinks is None or not all(_keeps_everything(cut) for cut in cuts):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    longest = _longest_token(backend, is_byte_level=any(cut["type"] == "ByteLevel" for cut in cuts))
    if longest is None:
        return None
    return shrinks * max(longest, _longest(token.content for token in added))


def _longest_token(backend: tokenizers.Tokenizer, is_byte_level: bool) -> int | None:
    """Return the length of the longest token in bytes; None if a text may have characters without tokens."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if is_byte_level and isinstance(backend.model, tokenizers.models.BPE):
        return max(map(len, vocabulary)) if vocabulary.keys() >= BYTE_OF_CHARACTER.keys() else None
    if getattr(backend.model, "byte_fallback", False) and vocabulary.keys() >= BYTE_TOKENS:
        return _longest(vocabulary)
    return None


def _longest(texts: Iterable[str]) -> int:
    return max((len(text.encode("utf-8")) for text in texts), default=1)


def _shrinks(normalizers: list[Component]) -> int | None:
    product = 1
    for part in normalizers:
        factor = _replace_shrinks(part) if part["type"] == "Replace" else _SHRINKS.get(part["type"])
        if factor is None:
            return None
        product *= factor
    return product


def _replace_shrinks(part: Component) -> int | None:
    """Return the factor by which a Replace normalizer can shrink a text.

    Returns None if it replaces a regular expression.
    """
    replaced, by = part["pattern"].get("String"), part["content"]
    if replaced is None or not by:
        return None
    return -(-len(replaced.encode("utf-8")) // len(by.encode("utf-8")))


def _keeps_everything(cut: Component) -> bool:
    return cut["type"] in _KEEP_EVERYTHING and cut.get("behavior") != "Removed"
