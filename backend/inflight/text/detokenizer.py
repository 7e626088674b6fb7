"""Ids to text while they are being generated.

Owns the state of one stream of text: bytes that are not a character yet, and whether the text has begun. Does not
know requests or stop strings. One object a sequence, used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from inflight.text.token_decoder import TokenDecoder
from inflight.text.tokenizer import Tokenizer

# More than enough of a prompt: an unfinished character takes at most 3 tokens, the start of a text rarely 2.
_PREFIX_TOKENS = 16


class IncrementalDetokenizer:
    """Turns ids into text deltas.

    All deltas and the flush together are `tokenizer.decode` of all ids, for any ids, at a cost per token that does
    not grow. A character whose bytes are spread over several tokens comes with the last of them; bytes that can
    no longer become a character come as U+FFFD as soon as that is known, and in `flush` at the latest.

    With `prefix_ids` the deltas *continue* the prefix's text instead of starting a text of their own. The
    difference is the leading space, which SentencePiece-style tokenizers drop at the start of a text but not
    inside of it: whenever `tokenizer.decode(prefix_ids)` is the beginning of
    `tokenizer.decode(prefix_ids + ids)`, it and the deltas together are the latter. It is not the beginning when
    the prefix ends within a character that the ids complete; then the deltas bring the whole character.

    A decoder that cannot work token by token (`TokenDecoder.is_token_by_token`) gives its text in `flush`.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Leave out special tokens, as in `Tokenizer.decode`.
        prefix_ids: The prompt, or its last ids; a handful with some text among them is enough.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        decoder = tokenizer.token_decoder
        self._text = _StreamedText(decoder) if decoder.is_token_by_token else _WholeText(decoder)
        self._shown = self._feed_prefix(tokenizer.tokens(prefix_ids, skip_special_tokens))

    def add(self, ids: Sequence[int]) -> str:
        """The text that `ids` bring; "" while they are the beginning of a character."""
        tokens = self._tokenizer.tokens(ids, self._skip_special_tokens)
        return self._not_shown_yet("".join([self._text.add(token) for token in tokens]))

    def hidden_text(self, token_id: int) -> str:
        """The spelling of a special token that is left out of the text; "" for every other token."""
        return self._tokenizer.special_text(token_id) if self._skip_special_tokens else ""

    def flush(self) -> str:
        """The text that is held back, as it is if nothing follows. Changes nothing."""
        shown = self._shown
        text = self._not_shown_yet(self._text.rest())
        self._shown = shown
        return text

    def _feed_prefix(self, tokens: list[str]) -> str:
        """Returns what of the prefix's text is going to come again: an unfinished character, shown as U+FFFD."""
        decoder = self._tokenizer.token_decoder
        if decoder.is_token_by_token:
            tokens = tokens[-_PREFIX_TOKENS:]
        emitted = "".join([self._text.add(token) for token in tokens])
        return decoder.text(tokens)[len(emitted) :]

    def _not_shown_yet(self, text: str) -> str:
        if not text or not self._shown:
            return text
        shown, self._shown = self._shown, ""
        common = takewhile(lambda pair: pair[0] == pair[1], zip(text, shown))
        return text[len(list(common)) :]


class _StreamedText:
    """Text that grows by a token at a time and is certain as soon as its bytes are characters."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._utf8 = decoder.utf8_decoder()
        # Tokens from before there is any text: what a decoder does at the start is decided by all of them.
        self._start: list[str] | None = None if decoder.is_byte_level else []

    def add(self, token: str) -> str:
        """Add a token; returns what is certain of the text now and was not before."""
        raw = self._decoder.raw_bytes(token)
        text = self._utf8.replace_pending() if raw is None else self._utf8.decode(raw)
        if self._start is not None:
            return self._add_to_start(self._start, token)
        return text if raw is not None else text + self._decoder.continued(token)

    def rest(self) -> str:
        """The remaining text if it ends here. Changes nothing."""
        return self._utf8.pending if self._start is None else self._decoder.text(self._start)

    def _add_to_start(self, start: list[str], token: str) -> str:
        start.append(token)
        # A pending byte is a token of its own: byte-level vocabularies have no start.
        text = self._decoder.text(start[: len(start) - self._utf8.num_pending])
        if text:
            self._start = None
        return text


class _WholeText:
    """Text that grows by a token at a time and is certain only once it is complete."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def add(self, token: str) -> str:
        self._tokens.append(token)
        return ""

    def rest(self) -> str:
        return self._decoder.text(self._tokens)
