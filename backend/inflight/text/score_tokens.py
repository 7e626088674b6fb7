"""The tokens that a decoder for scores answers with. Any thread."""

from __future__ import annotations

from inflight.errors import ConfigError, InvalidArgument
from inflight.text.tokenizer import Tokenizer


def find_score_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of the tokens "yes" and "no"; raise ConfigError if the tokenizer lacks one of them."""
    return _token_id(tokenizer, "yes"), _token_id(tokenizer, "no")


def _token_id(tokenizer: Tokenizer, word: str) -> int:
    try:
        ids = tokenizer.encode(word, add_special_tokens=False)
    except InvalidArgument:  # it cannot spell the word
        ids = []
    if len(ids) != 1:
        raise ConfigError(
            f"this model's tokenizer has no token {word!r}, of which scores are made: name a reranker by --model"
        )
    return ids[0]
