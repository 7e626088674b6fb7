"""Incremental detokenizer: turns token ids to text while they are generated.

Owns the state of one stream of text: the bytes of an incomplete character, and whether the text has begun. Does
not know requests or stop strings. One object per sequence, used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from inflight.text.token_decoder import TokenDecoder
from inflight.text.tokenizer import Tokenizer

# Enough of a prompt: an incomplete character takes at most 3 tokens, the start of a text rarely 2.
_PREFIX_TOKENS = 16


class IncrementalDetokenizer:
    """Turns token ids into text deltas.

    For any ids, all deltas and the flush together equal `tokenizer.decode` of all ids, at constant cost per token.
    A character whose bytes are spread over several tokens comes with the last of them. Bytes that can no longer
    become a character come as U+FFFD as soon as that is known, at the latest in `flush`.

    With `prefix_ids` the deltas *continue* the prefix's text instead of starting a text. The difference is the
    leading space, which SentencePiece-style tokenizers drop at the start of a text only: whenever
    `tokenizer.decode(prefix_ids)` is the beginning of `tokenizer.decode(prefix_ids + ids)`, the deltas are the
    rest of the latter. It is not the beginning if the prefix ends within a character that the ids complete; then
    the deltas have the whole character.

    A decoder that cannot work token by token (`TokenDecoder.is_token_by_token`) gives all of its text in `flush`.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Whether to leave out special tokens, as in `Tokenizer.decode`.
        prefix_ids: The prompt or its last ids; a handful with some text is enough.
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
        """Return the text that `ids` add; "" while a character is incomplete."""
        tokens = self._tokenizer.tokens(ids, self._skip_special_tokens)
        return self._not_shown_yet("".join([self._text.add(token) for token in tokens]))

    def hidden_text(self, token_id: int) -> str:
        """Return the spelling of a special token that is left out of the text; "" for every other token."""
        return self._tokenizer.special_text(token_id) if self._skip_special_tokens else ""

    def flush(self) -> str:
        """Return the text held back, as if nothing followed. Changes nothing."""
        shown = self._shown
        text = self._not_shown_yet(self._text.rest())
        self._shown = shown
        return text

    def _feed_prefix(self, tokens: list[str]) -> str:
        """Return the part of the prefix's text that will be repeated: an incomplete character, shown as U+FFFD."""
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
    """Text that grows token by token and is final as soon as its bytes form characters."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._utf8 = decoder.utf8_decoder()
        # Tokens at the start, before there is any text: all of them decide what the decoder does there.
        self._start: list[str] | None = None if decoder.is_byte_level else []

    def add(self, token: str) -> str:
        """Add a token; return the text that has become final."""
        raw = self._decoder.raw_bytes(token)
        text = self._utf8.replace_pending() if raw is None else self._utf8.decode(raw)
        if self._start is not None:
            return self._add_to_start(self._start, token)
        return text if raw is not None else text + self._decoder.continued(token)

    def rest(self) -> str:
        """Return the text that is still held back, as if the ids ended here. Changes nothing."""
        return self._utf8.pending if self._start is None else self._decoder.text(self._start)

    def _add_to_start(self, start: list[str], token: str) -> str:
        start.append(token)
        # A pending byte is a token of its own, as byte-level vocabularies do not get here.
        text = self._decoder.text(start[: len(start) - self._utf8.num_pending])
        if text:
            self._start = None
        return text


class _WholeText:
    """Text that grows token by token and is final only when complete."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def add(self, token: str) -> str:
        self._tokens.append(token)
        return ""

    def rest(self) -> str:
        return self._decoder.text(self._tokens)
