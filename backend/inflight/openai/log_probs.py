"""Log probs in OpenAI's formats, and prompt log probs in vLLM's format. Any thread."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import TopLogProbs

_MIN_LOG_PROB = -9999.0
"""Replaces -inf, which JSON cannot express; the same value as vLLM's."""


class TokenNames:
    """Names of tokens in a response.

    A token's name is its text; if its bytes are not valid UTF-8, the name shows the bytes, so that no two
    tokens have the same name.

    Args:
        token_bytes: The bytes that each token adds to a text, indexed by token id.
        by_id: Whether to name tokens by their ids instead, such as `token_id:17`.
    """

    def __init__(self, token_bytes: Sequence[bytes], by_id: bool = False) -> None:
        self._token_bytes = token_bytes
        self._by_id = by_id

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; b"" for an id that the tokenizer does not know."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def name(self, token_id: int) -> str:
        """Return the token's name."""
        if self._by_id:
            return f"token_id:{token_id}"
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(slots=True)
class CompletionLogProbs:
    """Builds `logprobs` of a /v1/completions choice, part by part.

    Attributes:
        names: Names of tokens.
        num_top: How many of the likeliest tokens to report at each position. The chosen token is always
            reported.
        offset: Number of characters of the text so far.
    """

    names: TokenNames
    num_top: int
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def start_with(self, text: str, ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        """Set the offset for a text that begins with the prompt `text`, whose tokens `ids` are added next.

        The tokens may have more bytes than the text: a token for the beginning of the sequence, or the
        leading space that some tokenizers add.
        """
        shown = b"".join(self.names.bytes_of(token_id) for token_id in ids if token_id not in hidden_ids)
        self.offset = len(text) - len(shown.decode(errors="replace"))

    def add(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float | None],
        tops: Sequence[TopLogProbs | None],
        hidden_ids: frozenset[int],
    ) -> dict[str, Any]:
        """Return `logprobs` for the next tokens.

        Args:
            ids: The tokens.
            log_probs: Log prob of each token; None for a text's first token.
            tops: Likeliest tokens at each position; empty if not requested.
            hidden_ids: Ids of tokens that add nothing to the text.
        """
        offsets: list[int] = []
        for token_id in ids:
            offsets.append(max(self.offset, 0))
            if token_id not in hidden_ids:
                self.offset += len(self._decoder.decode(self.names.bytes_of(token_id)))
        beside = [self._top(*each) for each in zip(ids, log_probs, tops or [None] * len(ids), strict=True)]
        return {
            "tokens": [self.names.name(token_id) for token_id in ids],
            "token_logprobs": [None if value is None else finite(value) for value in log_probs],
            "top_logprobs": beside,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, log_prob: float | None, top: TopLogProbs | None) -> dict[str, float] | None:
        if log_prob is None:
            return None
        named: dict[str, float] = {}
        if top is not None:
            for other, value in zip(top.token_ids[: self.num_top], top.log_probs):
                named.setdefault(self.names.name(other), finite(value))
        named.setdefault(self.names.name(token_id), finite(log_prob))
        return named


def chat_log_probs(
    names: TokenNames,
    num_top: int,
    ids: Sequence[int],
    log_probs: Sequence[float],
    tops: Sequence[TopLogProbs],
) -> dict[str, Any]:
    """Return `logprobs` of a /v1/chat/completions choice for these tokens."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": names.name(token_id),
            "logprob": finite(value),
            "bytes": list(names.bytes_of(token_id)),
        }

    content: list[dict[str, Any]] = []
    for place, (token_id, value) in enumerate(zip(ids, log_probs, strict=True)):
        beside = tops[place] if num_top else TopLogProbs((), ())
        top = [entry(*pair) for pair in zip(beside.token_ids[:num_top], beside.log_probs)]
        content.append({**entry(token_id, value), "top_logprobs": top})
    return {"content": content, "refusal": None}


def top_of_prompt(logits: FloatTensor, ids: Sequence[int], num_top: int) -> list[TopLogProbs]:
    """Return the likeliest tokens at each prompt position except the first, which has no predecessor.

    Args:
        logits: float32 [prompt tokens, vocab_size]; row i predicts token i + 1.
        ids: Token ids of the prompt.
        num_top: Number of tokens for each position.
    """
    rows = _rows(logits)
    tops: list[TopLogProbs] = []
    for row in rows[: len(ids) - 1]:
        count = min(num_top, len(row))
        best = np.argpartition(row, len(row) - count)[len(row) - count :]
        best = best[np.lexsort((best, -row[best]))]
        highest = row[best[0]] if count else row.max()
        total = highest + np.log(np.exp(row - highest, dtype=np.float64).sum())
        tops.append(TopLogProbs(tuple(best.tolist()), tuple((row[best] - total).tolist())))
    return tops


def ranks_in_prompt(logits: FloatTensor, ids: Sequence[int]) -> list[int]:
    """Return the rank of each prompt token except the first; the likeliest has rank 1.

    Args:
        logits: float32 [prompt tokens, vocab_size]; row i predicts token i + 1.
        ids: Token ids of the prompt.
    """
    ranks: list[int] = []
    for row, token_id in zip(_rows(logits), ids[1:]):
        better = np.count_nonzero(row > row[token_id]) + np.count_nonzero(row[:token_id] == row[token_id])
        ranks.append(int(better) + 1)
    return ranks


def _rows(logits: FloatTensor) -> NDArray[np.float32]:
    return np.frombuffer(logits.data, np.float32).reshape(logits.shape)


def prompt_log_probs_json(
    names: TokenNames,
    ids: Sequence[int],
    log_probs: Sequence[float],
    tops: Sequence[TopLogProbs],
    num_top: int,
    ranks: Sequence[int],
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, for each other one log probs by token id."""
    told: list[dict[str, Any] | None] = [None]
    for place, (token_id, value) in enumerate(zip(ids[1:], log_probs[1:])):
        top = tops[place] if tops else TopLogProbs((), ())
        entries = {str(token_id): _ranked(names, token_id, value, ranks[place] if ranks else None)}
        for rank, (other, other_value) in enumerate(zip(top.token_ids[:num_top], top.log_probs), 1):
            entries.setdefault(str(other), _ranked(names, other, other_value, rank))
        told.append(entries)
    return told


def _ranked(names: TokenNames, token_id: int, value: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(value), "rank": rank, "decoded_token": names.name(token_id)}


def finite(value: float) -> float:
    """Return the log prob, but at least `_MIN_LOG_PROB`, because JSON has no -inf."""
    return max(value, _MIN_LOG_PROB)
