"""Convert an OutputStream's outputs to the texts, tokens and finish reasons of choices, and count the usage.

Maps sequences to choices and records which choices have ended. The routes make the JSON. Runs on the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from inflight.core.request.response import SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.errors import Cancelled, InvalidArgument, Unsupported
from inflight.openai.errors import in_fields
from inflight.openai.log_probs import ranks_in_prompt, top_of_prompt
from inflight.openai.protocol import SamplingBody
from inflight.openai.sampling import BodySettings
from inflight.prompt import Output, Prompt
from inflight.serving.completion_text import new_tokens
from inflight.serving.engine_session import OutputStream

FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "length",
}
_CUTS = frozenset((FinishReason.STOP_WORDS, FinishReason.LENGTH, FinishReason.TIMED_OUT))
"""Finish reasons that are not the model's end token: the text may end inside a tool call or a reasoning mark."""


@dataclass(slots=True)
class Piece:
    """The part of one result that belongs to one choice.

    Attributes:
        index: Index of the choice in the response.
        batch_index: Index of the choice's prompt in the body.
        text: New text.
        token_ids: New token ids.
        finish_reason: OpenAI's finish reason; None while the choice is generating.
        log_probs: Log prob of each new token; None if not requested.
        top_log_probs: Likeliest tokens at each new token's position; None if not requested.
        prompt_log_probs: Log prob of each prompt token, 0.0 for the first. Only in the choice's first piece.
        prompt_tops: Likeliest tokens at each prompt position except the first. Only in the choice's first
            piece.
        prompt_ranks: Rank of each prompt token except the first; 1 is the likeliest, and among equally
            likely tokens the lower id ranks first. Only in the choice's first piece; empty if ranks were not
            requested or are not known.
        is_first: Whether this is the choice's first piece.
        is_cut: Whether a limit or a stop string, not the model, ended the choice.
        stop_string: The stop string that ended the choice; "" for none.
    """

    index: int
    batch_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    log_probs: tuple[float, ...] | None = None
    top_log_probs: tuple[TopLogProbs, ...] | None = None
    prompt_log_probs: tuple[float, ...] | None = None
    prompt_tops: Sequence[TopLogProbs] = ()
    prompt_ranks: Sequence[int] = ()
    is_first: bool = False
    is_cut: bool = False
    stop_string: str = ""

    def has_content(self, with_ids: bool) -> bool:
        """Return whether the piece has content for a client. Bytes of an incomplete character are not
        content.

        Args:
            with_ids: Whether the response has token ids too; the first piece then has the prompt's ids.
        """
        has_ids = with_ids and bool(self.token_ids or self.is_first)
        return has_ids or bool(self.text or self.finish_reason or self.log_probs or self.prompt_log_probs)

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """Join consecutive pieces of one choice to one piece."""
        first, last = pieces[0], pieces[-1]
        if len(pieces) == 1:
            return first
        return cls(
            first.index,
            first.batch_index,
            "".join(piece.text for piece in pieces),
            tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
            last.finish_reason,
            None
            if first.log_probs is None
            else tuple(chain.from_iterable(piece.log_probs or () for piece in pieces)),
            None
            if first.top_log_probs is None
            else tuple(chain.from_iterable(piece.top_log_probs or () for piece in pieces)),
            first.prompt_log_probs,
            first.prompt_tops,
            first.prompt_ranks,
            is_first=True,
            is_cut=last.is_cut,
            stop_string=last.stop_string,
        )


class Usage:
    """Token counts of an answer so far.

    Attributes:
        prompt_tokens: Tokens of all prompts, each prompt counted once.
        completion_tokens: Generated tokens of all choices.
        cached_tokens: Prompt tokens found in the KV cache, in whole blocks.
        reasoning_tokens: How many of the `completion_tokens` are reasoning; None if not known.
    """

    def __init__(self, prompts: Sequence[Prompt], tokens_per_block: int) -> None:
        self._prompt_lengths = [prompt.request.prompt_length for prompt in prompts]
        self._tokens_per_block = tokens_per_block
        self._cached = [0] * len(prompts)
        self.prompt_tokens = sum(self._prompt_lengths)
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    def add(self, batch_index: int, result: SequenceResult) -> None:
        """Count a result's cached prompt tokens, once per prompt: all sequences share the prompt's computation."""
        metrics = result.perf_metrics
        if metrics is not None and result.sequence_index == 0:
            length = self._prompt_lengths[batch_index]
            self._cached[batch_index] = metrics.cached_tokens(length, self._tokens_per_block)

    def of_chunk(self, body: SamplingBody) -> dict[str, Any]:
        """Return the fields to add to a stream's chunk: `usage` with the counts so far, or null, or no field."""
        if body.has_continuous_usage:
            return {"usage": self.as_json()}
        return {"usage": None} if body.includes_usage else {}

    def as_json(self) -> dict[str, Any]:
        """Return the `usage` object of an answer in OpenAI's form."""
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            told["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return told


@dataclass(slots=True)
class AnswerReceipt:
    """The receipt of an answer, which comes with its last output.

    Attributes:
        document: The receipt's JSON object; None until the answer has ended.
    """

    document: dict[str, Any] | None = None

    def of_answer(self, body: SamplingBody) -> dict[str, Any]:
        """Return the field to add to a whole answer or to the last chunk of a stream."""
        return {"receipt": self.document} if body.return_receipt else {}


class Pieces:
    """Converter from one answer's outputs to pieces.

    Args:
        asked: Settings of the body.
        usage: Counter to which the tokens are added.
        receipt: Gets the receipt.
    """

    def __init__(self, asked: BodySettings, usage: Usage, receipt: AnswerReceipt) -> None:
        self._asked = asked
        self._usage = usage
        self._receipt = receipt
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    async def read(self, stream: OutputStream) -> AsyncIterator[list[Piece]]:
        """Yield lists of pieces to send together, until every sequence has ended."""
        try:
            async for outputs in stream:
                pieces: list[Piece] = []
                for output in outputs:
                    pieces += self._of_output(output, *await self._of_prompt(output))
                if pieces:
                    yield pieces
        except (InvalidArgument, Unsupported) as error:
            raise in_fields(error, self._asked.fields) from None

    async def _of_prompt(self, output: Output) -> tuple[Sequence[TopLogProbs], Sequence[int]]:
        """Return (likeliest tokens at each prompt position, ranks of the prompt tokens).

        Both are empty if not requested.
        """
        logits, num_top = output.result.context_logits, self._asked.num_prompt_top
        if logits is None:
            return (), ()
        ids = output.prompt.request.input_token_ids
        tops = await asyncio.to_thread(top_of_prompt, logits, ids, num_top) if num_top else ()
        tells_ranks = self._asked.body.prompt_logprobs is not None
        return tops, await asyncio.to_thread(ranks_in_prompt, logits, ids) if tells_ranks else ()

    def _of_output(
        self, output: Output, prompt_tops: Sequence[TopLogProbs], prompt_ranks: Sequence[int]
    ) -> list[Piece]:
        result, texts = output.result, output.texts or ()
        self._usage.add(output.batch_index, result)
        if result.receipt is not None:
            self._receipt.document = msgspec.json.decode(result.receipt)
        first = output.batch_index * self._asked.body.n + result.sequence_index
        pieces: list[Piece] = []
        for row, ids in enumerate(new_tokens(result)):
            if first + row not in self._ended:
                text = texts[row] if texts else ""
                pieces.append(self._piece(first + row, row, text, ids, output))
                pieces[-1].prompt_tops, pieces[-1].prompt_ranks = prompt_tops, prompt_ranks
        return pieces

    def _piece(self, index: int, row: int, text: str, ids: tuple[int, ...], output: Output) -> Piece:
        result, top = output.result, output.result.top_log_probs
        reason = result.finish_reasons[row]
        if reason is FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled")
        if reason is not FinishReason.NOT_FINISHED:
            self._ended.add(index)
        log_probs = result.model_log_probs or result.log_probs
        piece = Piece(
            index,
            output.batch_index,
            text,
            ids,
            FINISH_REASONS.get(reason),
            None if log_probs is None else log_probs[row],
            None if top is None else top[row],
            result.prompt_log_probs,
            is_first=index not in self._begun,
            is_cut=reason in _CUTS,
            stop_string=output.stop_string,
        )
        self._begun.add(index)
        if self._asked.max_tokens == 0:  # the engine generates one token, in its only result
            piece.text, piece.token_ids, piece.finish_reason = (
                output.prompt.options.prompt_text or "",
                (),
                "length",
            )
            piece.log_probs, piece.top_log_probs = (), ()
        self._usage.completion_tokens += len(piece.token_ids)
        return piece
