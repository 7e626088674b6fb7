"""How the token strings of a vocabulary become text.

Owns what the rest of this package needs to know of a tokenizer's decoder: the bytes a token stands for, whether
text can be made token by token, and what becomes of bytes that are not UTF-8. Does not know ids, special tokens
or streams. Immutable; any thread.

Three families of decoders matter. *Byte-level* BPE spells every token in an alphabet of 256 characters, one for
each byte. *SentencePiece-style* decoders work on the strings and spell only what the vocabulary lacks in bytes,
as `<0xE4>`. WordPiece and its like have no bytes at all.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import tokenizers

Component = dict[str, Any]
"""A normalizer, pre-tokenizer or decoder as tokenizer.json writes it."""

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what Python's surrogateescape makes of an invalid byte
_ANCHOR = "a"

# Decoders that look at one token at a time, except for what they do at the very start of a text.
_TOKEN_BY_TOKEN = re.compile(r"((Replace|Strip|Metaspace|WordPiece) )*(ByteFallback )?(Fuse (Strip )*)?")


def described(component: Any, key: str) -> list[Component]:
    """A normalizer, pre-tokenizer or decoder as tokenizer.json writes it, with sequences flattened.

    Args:
        component: Of the `tokenizers` library; None, where a tokenizer has none, is an empty list.
        key: What a sequence calls its parts: normalizers, pretokenizers or decoders.
    """

    def flatten(part: Component) -> Iterator[Component]:
        if part["type"] != "Sequence":
            yield part
            return
        for inner in part[key]:
            yield from flatten(inner)

    return [] if component is None else list(flatten(json.loads(component.__getstate__())))


class Utf8Decoder:
    """Incremental UTF-8 decoder that replaces invalid bytes, one U+FFFD for each byte or each broken character."""

    def __init__(self, replace_each_byte: bool) -> None:
        self._errors = "surrogateescape" if replace_each_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._errors)

    def decode(self, raw: bytes) -> str:
        """The characters that `raw` completes, or breaks; a sequence that may still complete stays pending."""
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.decode(raw))

    def replace_pending(self) -> str:
        """Replace what is pending, as invalid bytes; the next `decode` starts afresh."""
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.decode(b"", final=True))

    @property
    def pending(self) -> str:
        """The text that `replace_pending` would return."""
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.getstate()[0].decode("utf-8", self._errors))

    @property
    def num_pending(self) -> int:
        """Bytes of a sequence that may still complete: 0 to 3."""
        return len(self._decoder.getstate()[0])


class TokenDecoder:
    """Turns one tokenizer's token strings into text.

    Attributes:
        is_byte_level: Every token stands for bytes, and a text is its bytes, wherever it starts.
        is_token_by_token: A token's text depends neither on the tokens after it nor, past the start of the text,
            on those before it; bytes aside.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._decoder = backend.decoder
        parts = described(self._decoder, "decoders")
        names = [part["type"] for part in parts]
        self.is_byte_level = names == ["ByteLevel"]
        self.is_token_by_token = self.is_byte_level or _is_token_by_token(parts)
        self._has_byte_tokens = "ByteFallback" in names
        self._anchor_length = len(self._join([_ANCHOR]))

    def text(self, tokens: Sequence[str]) -> str:
        """The text of a whole sequence of tokens.

        Differs from the `tokenizers` library in one point. In a run of byte tokens that is not UTF-8 as a whole,
        valid characters survive and each invalid byte becomes one U+FFFD, as in SentencePiece; the library
        replaces the whole run, however long, so that text already streamed would have to be taken back.
        """
        if self._has_byte_tokens:
            tokens = list(self._without_invalid_bytes(tokens))
        return self._join(tokens)

    def continued(self, token: str) -> str:
        """The text of a token that is not the first; not for tokens that stand for bytes."""
        return self._join([_ANCHOR, token])[self._anchor_length :]

    def within_text(self, token: str) -> str:
        """The text of a special token where special tokens are not left out."""
        return self.text([token]) if self.is_byte_level else self.continued(token)

    def raw_bytes(self, token: str) -> bytes | None:
        """The bytes a token stands for, None for a token that stands for its text."""
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token
                return token.encode()
        match = self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else None

    def utf8_decoder(self) -> Utf8Decoder:
        """An incremental decoder that replaces invalid bytes as this tokenizer does."""
        return Utf8Decoder(replace_each_byte=not self.is_byte_level)

    def _join(self, tokens: Sequence[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def _without_invalid_bytes(self, tokens: Iterable[str]) -> Iterator[str]:
        for raw, run in groupby(tokens, key=lambda token: self.raw_bytes(token) is not None):
            if not raw:
                yield from run
                continue
            data = b"".join(self.raw_bytes(token) or b"" for token in run)
            for character in data.decode("utf-8", "surrogateescape"):
                if _ESCAPED_BYTE.match(character):
                    yield REPLACEMENT
                else:
                    yield from (f"<0x{byte:02X}>" for byte in character.encode())


def _is_token_by_token(parts: list[Component]) -> bool:
    names = [part["type"] for part in parts]
    if not _TOKEN_BY_TOKEN.fullmatch("".join(f"{name} " for name in names)):
        return False
    fused = parts[names.index("Fuse") :] if "Fuse" in names else []
    return all(part.get("stop", 0) == 0 for part in fused)  # else the end of the text is still to be cut


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE: printable Latin-1 stands for itself, every other byte for a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()
"""The byte that each of the 256 characters of a byte-level vocabulary stands for."""

BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""How SentencePiece-style vocabularies spell bytes."""
