"""From outputs of a session to what each choice gets: texts, tokens, finish reasons; and the usage of it all.

Knows which choice a sequence is and when it has ended, and nothing of a route's JSON. Event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

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
"""Ends that the model has not chosen, so that its text may end within a mark."""


@dataclass(slots=True)
class Piece:
    """The part of one choice that one result adds.

    Attributes:
        index: The choice's place in the answer.
        batch_index: Which of the body's prompts it belongs to.
        text: What its text goes on with.
        token_ids: The tokens that have come.
        finish_reason: Why it has ended; None while it goes on.
        log_probs: Of each token; None if they are not wanted.
        top_log_probs: Beside each token; None if they are not wanted.
        prompt_log_probs: Of each prompt token, the first 0.0; with the choice's first piece.
        prompt_tops: The likeliest tokens beside each prompt token but the first; with the choice's first piece.
        prompt_ranks: The rank of each prompt token but the first, 1 for the likeliest; of equally likely ones the
            lower id comes first. With the choice's first piece; empty where ranks are not asked for or not known.
        is_first: Whether this is the choice's first piece.
        is_cut: Whether a limit or a stop string has ended it, not the model.
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

    def says_something(self, with_ids: bool) -> bool:
        """Whether a client learns anything by it: bytes of an unfinished character tell nothing yet.

        Args:
            with_ids: Clients are told token ids too, the prompt's with the first piece.
        """
        has_ids = with_ids and bool(self.token_ids or self.is_first)
        return has_ids or bool(self.text or self.finish_reason or self.log_probs or self.prompt_log_probs)

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """All of a choice's pieces as one."""
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
        )


class Usage:
    """Tokens of an answer so far.

    Attributes:
        prompt_tokens: Of all prompts, each counted once.
        completion_tokens: Generated, of all choices.
        cached_tokens: Of the prompts, what was found in the KV cache, in whole blocks.
        reasoning_tokens: Of completion_tokens, those that the model has thought with; None where it is not said.
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
        """Count what the engine says of a prompt's first sequence, which computes the prompt for its siblings."""
        metrics = result.perf_metrics
        if metrics is not None and result.sequence_index == 0:
            length, size = self._prompt_lengths[batch_index], self._tokens_per_block
            # The last block may have been found in part; nobody tells how far, so only whole ones count.
            num_whole = min(metrics.num_reused_blocks, length // size - metrics.num_missed_blocks)
            self._cached[batch_index] = min(max(num_whole, 0) * size, length - 1)

    def of_chunk(self, body: SamplingBody) -> dict[str, Any]:
        """The usage field of a chunk of a stream: the usage so far, null, or no key at all."""
        if body.has_continuous_usage:
            return {"usage": self.as_json()}
        return {"usage": None} if body.includes_usage else {}

    def as_json(self) -> dict[str, Any]:
        """The `usage` object of an answer, in OpenAI's form."""
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            told["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return told


class Pieces:
    """Turns the outputs of one answer into pieces.

    Args:
        asked: What its body asks for.
        usage: Counts what comes.
    """

    def __init__(self, asked: BodySettings, usage: Usage) -> None:
        self._asked = asked
        self._usage = usage
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    async def read(self, stream: OutputStream) -> AsyncIterator[list[Piece]]:
        """Yield the pieces that go out together, until everything has ended."""
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
        """The likeliest tokens beside those of the prompt, and the ranks of these; empty where nobody asks."""
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
        )
        self._begun.add(index)
        if self._asked.max_tokens == 0:  # the engine has made one, in its only result
            piece.text, piece.token_ids, piece.finish_reason = (
                output.prompt.options.prompt_text or "",
                (),
                "length",
            )
            piece.log_probs, piece.top_log_probs = (), ()
        self._usage.completion_tokens += len(piece.token_ids)
        return piece
