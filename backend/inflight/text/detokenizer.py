"""Incremental detokenizer: converts token ids to text while they are generated.

It stores the bytes of an incomplete character, and whether the text has begun. Each sequence has its own
detokenizer, which is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from inflight.text.token_decoder import TokenDecoder
from inflight.text.tokenizer import Tokenizer

# Number of a prompt's last tokens that are needed: an incomplete character takes at most 3 tokens, the start
# of a text rarely 2.
_PREFIX_TOKENS = 16


class IncrementalDetokenizer:
    """Converts token ids to text deltas, at constant cost per token.

    For any ids, the concatenation of all deltas and of `flush` equals `tokenizer.decode` of all ids. A
    character whose bytes are spread over several tokens is returned with the last of these tokens. Bytes
    that can no longer become a character are returned as U+FFFD as soon as this is certain, at the latest by
    `flush`.

    With `prefix_ids` the deltas *continue* the prefix's text instead of starting a text. The difference is
    the leading space, which SentencePiece-style tokenizers drop only at the start of a text. The deltas are
    `tokenizer.decode(prefix_ids + ids)` without its beginning `tokenizer.decode(prefix_ids)`. If the prefix
    ends within a character that the ids complete, the deltas have the whole character.

    If the tokenizer cannot be decoded token by token (`TokenDecoder.is_token_by_token`), `flush` returns all
    of the text.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Whether to leave out special tokens, as in `Tokenizer.decode`.
        prefix_ids: Ids of the prompt, or only its last few ids, if they have some text.
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
        """Return the text that is still held back, as if the ids ended here. Does not change the state."""
        shown = self._shown
        text = self._not_shown_yet(self._text.rest())
        self._shown = shown
        return text

    def _feed_prefix(self, tokens: list[str]) -> str:
        """Process the prefix.

        Returns the part of its text that the deltas repeat: an incomplete character, as U+FFFD.
        """
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
        # The tokens before there is any text. How they are decoded depends on all of them.
        self._start: list[str] | None = None if decoder.is_byte_level else []

    def add(self, token: str) -> str:
        """Add a token; return the text that has become final."""
        raw = self._decoder.raw_bytes(token)
        text = self._utf8.replace_pending() if raw is None else self._utf8.decode(raw)
        if self._start is not None:
            return self._add_to_start(self._start, token)
        return text if raw is not None else text + self._decoder.continued(token)

    def rest(self) -> str:
        """Return the text that is still held back, as if the tokens ended here. Does not change the state."""
        return self._utf8.pending if self._start is None else self._decoder.text(self._start)

    def _add_to_start(self, start: list[str], token: str) -> str:
        start.append(token)
        # A pending byte is a token of its own, because byte-level vocabularies do not use this method.
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
