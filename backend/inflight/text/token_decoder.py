"""Decode a vocabulary's token strings to text.

Determines the bytes of a token and whether text can be decoded token by token, and handles bytes that are
not UTF-8. Immutable; any thread.

There are three kinds of decoders. *Byte-level* BPE spells every token in an alphabet of 256 characters, one
per byte. *SentencePiece-style* decoders work on strings, and only text outside of the vocabulary is spelled
in bytes, such as `<0xE4>`. WordPiece and similar decoders have no bytes.
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
"""A normalizer, pre-tokenizer or decoder in the form of tokenizer.json."""

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # an invalid byte under Python's surrogateescape
_ANCHOR = "a"

# Sequences of decoders that handle one token at a time, except at the very start of a text.
_TOKEN_BY_TOKEN = re.compile(r"((Replace|Strip|Metaspace|WordPiece) )*(ByteFallback )?(Fuse (Strip )*)?")


def described(component: Any, key: str) -> list[Component]:
    """Return a normalizer, pre-tokenizer or decoder in the form of tokenizer.json, with sequences flattened.

    Args:
        component: The component of the `tokenizers` library; None gives an empty list.
        key: The key that has the parts of a sequence: normalizers, pretokenizers or decoders.
    """

    def flatten(part: Component) -> Iterator[Component]:
        if part["type"] != "Sequence":
            yield part
            return
        for inner in part[key]:
            yield from flatten(inner)

    return [] if component is None else list(flatten(json.loads(component.__getstate__())))


class Utf8Decoder:
    """Incremental UTF-8 decoder that replaces each invalid byte, or each incomplete character, by one U+FFFD."""

    def __init__(self, replace_each_byte: bool) -> None:
        self._errors = "surrogateescape" if replace_each_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._errors)

    def decode(self, raw: bytes) -> str:
        """Add bytes; return the characters that are now certain.

        An incomplete character at the end stays pending.
        """
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.decode(raw))

    def replace_pending(self) -> str:
        """Return the replacement of the pending bytes, and drop these bytes."""
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.decode(b"", final=True))

    @property
    def pending(self) -> str:
        """The text that `replace_pending` would return."""
        return _ESCAPED_BYTE.sub(REPLACEMENT, self._decoder.getstate()[0].decode("utf-8", self._errors))

    @property
    def num_pending(self) -> int:
        """Number of bytes of an incomplete sequence: 0 to 3."""
        return len(self._decoder.getstate()[0])


class TokenDecoder:
    """Converts a tokenizer's token strings to text.

    Attributes:
        is_byte_level: Whether every token represents bytes, independent of its position in the text.
        is_token_by_token: Whether, except for incomplete characters, a token's text does not depend on later
            tokens, nor on earlier tokens after the start of the text.
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
        """Return the text of a whole sequence of tokens.

        Differs from the `tokenizers` library in one point: if a run of byte tokens is not valid UTF-8, its
        valid characters are kept, and each invalid byte is replaced by one U+FFFD, as in SentencePiece. The
        library replaces the whole run, however long, so that text that was already streamed would have to be
        taken back.
        """
        if self._has_byte_tokens:
            tokens = list(self._without_invalid_bytes(tokens))
        return self._join(tokens)

    def continued(self, token: str) -> str:
        """Return the text of a token that is not the first of a text. Must not be called for byte tokens."""
        return self._join([_ANCHOR, token])[self._anchor_length :]

    def within_text(self, token: str) -> str:
        """Return the text of a special token within a text that includes special tokens."""
        return self.text([token]) if self.is_byte_level else self.continued(token)

    def raw_bytes(self, token: str) -> bytes | None:
        """Return the bytes of a byte token, None for other tokens."""
        if self.is_byte_level:
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token
                return token.encode()
        match = self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else None

    def utf8_decoder(self) -> Utf8Decoder:
        """Return an incremental decoder that replaces invalid bytes like this tokenizer."""
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
    return all(part.get("stop", 0) == 0 for part in fused)  # a `stop` other than 0 strips the end of the text


def _byte_level_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet: printable Latin-1 for itself, U+0100 and up for all other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()
"""The byte of each of the 256 characters of a byte-level vocabulary."""

BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The spellings of bytes in SentencePiece-style vocabularies."""
