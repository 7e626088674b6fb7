"""From the engine's responses to a client's: what each `Response` carries, and what it repeats of those before.

An `Answers` object belongs to one request. The engine's thread adds to it, which costs next to nothing; whoever
fetches an `EngineAnswer` makes the `Response` of it, tensors included, on a thread of their own. Answers of one
request may be fetched in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

from inflight.additional_outputs import CONTEXT
from inflight.core.report.stats import hit_rate, ratio
from inflight.core.request import request as core
from inflight.core.request import response as core_response
from inflight.executor.errors import in_fields
from inflight.executor.response import (
    AdditionalOutput,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The parts of a request that its responses depend on.

    Attributes:
        streaming: Whether there is a response for every iteration.
        repeats_tokens: Whether streamed responses have everything generated so far.
        max_tokens: Most tokens to generate.
        vocab_size: Width of logits.
        client_id: Goes back with every response.
        output: What comes back.
        tokens_per_block: Of the KV cache.
    """

    streaming: bool
    repeats_tokens: bool
    max_tokens: int
    vocab_size: int
    client_id: int | None
    output: core.OutputOptions
    tokens_per_block: int = 1

    @property
    def looks_back(self) -> bool:
        """Whether a response repeats what earlier ones had."""
        output = self.output
        return self.streaming and (
            self.repeats_tokens or output.return_log_probs or output.return_context_logits
        )


class Answers:
    """The answers to one request.

    Attributes:
        asked: What they depend on.
        num_sequences: How many sequences count as one place in the queue each.
        have_ended: Whether the final one has come. Under the lock of `EnqueuedRequests`.
    """

    def __init__(self, asked: ResponseOptions, num_sequences: int) -> None:
        self.asked = asked
        self.num_sequences = num_sequences
        self.have_ended = False
        self._history: dict[
            int, list[core_response.SequenceResult]
        ] = {}  # by sequence index, if it is needed
        self._num_generated: dict[int, int] = {}  # by sequence index

    def add(self, response: core_response.Response) -> EngineAnswer:
        """The engine's next response. One thread at a time."""
        result = response.result
        if result is None:
            return self._answer(response, (), 0)
        index, count = result.sequence_index, result.num_output_tokens[0]
        if not result.is_cumulative:
            count += self._num_generated.get(index, 0)
        self._num_generated[index] = count
        if not self.asked.looks_back:
            return self._answer(response, (), count)
        history = self._history.setdefault(index, [])
        if result.is_cumulative:
            del history[1:]  # what came before is in this one, but for the context of the first
        history.append(result)
        return self._answer(response, tuple(history), count)

    def _answer(
        self,
        response: core_response.Response,
        so_far: Sequence[core_response.SequenceResult],
        num_generated: int,
    ) -> EngineAnswer:
        return EngineAnswer(
            response.request_id,
            response.result,
            response.error,
            response.is_final,
            answers=self,
            so_far=so_far,
            num_generated=num_generated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer(core_response.Response):
    """One response as it came from the engine, and what a program's response is made of beside it.

    Attributes:
        answers: Of its request.
        so_far: Its sequence's results up to this one, where a response repeats them.
        num_generated: Tokens that its sequence, or its best beam, has generated up to this one.
    """

    answers: Answers
    so_far: Sequence[core_response.SequenceResult]
    num_generated: int

    def to_response(self) -> Response:
        """The answer as the client gets it."""
        asked, result = self.answers.asked, self.result
        if result is None:
            said = "" if self.error is None else str(in_fields(self.error))
            return Response(self.request_id, said or "unknown error", asked.client_id)
        return Response(self.request_id, self._result(asked, result), asked.client_id)

    def _result(self, asked: ResponseOptions, result: core_response.SequenceResult) -> Result:
        so_far = (result,) if result.is_cumulative else self.so_far or (result,)
        repeats = asked.streaming and asked.repeats_tokens
        iterations = result.num_iterations
        return Result(
            is_final=self.is_final,
            output_token_ids=_joined([each.output_token_ids for each in (so_far if repeats else (result,))]),
            cum_log_probs=None if result.cum_log_probs is None else list(result.cum_log_probs),
            log_probs=_log_probs(so_far) if asked.output.return_log_probs else None,
            context_logits=_context_logits(self.so_far or (result,)),
            generation_logits=_generation_logits(asked, so_far if repeats else (result,)),
            finish_reasons=list(result.finish_reasons),
            sequence_index=result.sequence_index,
            is_sequence_final=result.is_sequence_final,
            decoding_iter=iterations,
            avg_decoded_tokens_per_iter=ratio(self.num_generated, iterations),
            additional_outputs=_additional_outputs(so_far if repeats else (result,)),
            request_perf_metrics=None
            if result.perf_metrics is None
            else _perf_metrics(result, asked.tokens_per_block),
        )


def _joined(parts: Sequence[tuple[tuple[int, ...], ...]]) -> list[list[int]]:
    return [list(chain.from_iterable(beam)) for beam in zip(*parts, strict=True)]


def _log_probs(results: Iterable[core_response.SequenceResult]) -> list[list[float]]:
    parts = [each.log_probs for each in results if each.log_probs is not None]
    return [list(chain.from_iterable(beam)) for beam in zip(*parts, strict=True)]


def _context_logits(results: Iterable[core_response.SequenceResult]) -> torch.Tensor | None:
    found = next((each.context_logits for each in results if each.context_logits is not None), None)
    return None if found is None else _tensor(found)


def _generation_logits(
    asked: ResponseOptions, results: Sequence[core_response.SequenceResult]
) -> torch.Tensor | None:
    """[tokens, beams, vocab_size] of a stream, else [beams, max_tokens, vocab_size], 0 behind the last token."""
    by_result = [each.generation_logits for each in results]
    if any(tensors is None for tensors in by_result):
        return None
    import torch

    beams: list[torch.Tensor] = []
    for tensors in zip(*(tensors or () for tensors in by_result), strict=True):
        rows = [_tensor(tensor) for tensor in tensors if tensor.shape[0]]
        beams.append(torch.cat(rows) if rows else torch.zeros(0, asked.vocab_size))
    if asked.streaming:
        return torch.stack(beams, dim=1)
    whole = torch.zeros(len(beams), asked.max_tokens, asked.vocab_size)
    for beam, rows in zip(whole, beams, strict=True):
        beam[: len(rows)] = rows
    return whole


def _additional_outputs(results: Sequence[core_response.SequenceResult]) -> list[AdditionalOutput]:
    """`context_<name>` [prompt tokens, width] and `generation_<name>` [1, tokens, width], rows joined by name."""
    if not any(each.additional_outputs for each in results):
        return []
    import torch

    rows: dict[str, list[torch.Tensor]] = {}
    for output in chain.from_iterable(each.additional_outputs for each in results):
        (tensor,) = output.tensors  # a search, which would have more, has no such outputs
        rows.setdefault(output.name, []).append(_tensor(tensor))
    found: list[AdditionalOutput] = []
    for name, parts in rows.items():
        filled = [part for part in parts if part.shape[0]]
        joined = torch.cat(filled) if filled else parts[0]
        found.append(AdditionalOutput(name, joined if name.startswith(CONTEXT) else joined.unsqueeze(0)))
    return found


def _tensor(tensor: core.FloatTensor) -> torch.Tensor:
    import torch

    if not tensor.data:
        return torch.zeros(tensor.shape)
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)


def _perf_metrics(result: core_response.SequenceResult, tokens_per_block: int) -> RequestPerfMetrics:
    found = result.perf_metrics
    assert found is not None, "it is wanted"
    # TensorRT-LLM's count has the prompt's last block, be it full or not.
    num_missed = max(0, -(-result.num_input_tokens // tokens_per_block) - found.num_reused_blocks)
    has_tokens = found.first_token_time_ns > 0
    return RequestPerfMetrics(
        TimingMetrics(
            arrival_time=_time(found.arrival_time_ns),
            first_scheduled_time=_time(found.first_scheduled_time_ns),
            first_token_time=_time(found.first_token_time_ns),
            last_token_time=_time(found.last_token_time_ns),
        ),
        KvCacheMetrics(
            num_total_allocated_blocks=found.num_new_blocks,
            num_new_allocated_blocks=found.num_new_blocks,
            num_reused_blocks=found.num_reused_blocks,
            num_missed_blocks=num_missed,
            kv_cache_hit_rate=hit_rate(found.num_reused_blocks, num_missed),
        ),
        SpeculativeDecodingMetrics(
            acceptance_rate=found.acceptance_rate,
            total_accepted_draft_tokens=found.num_accepted_draft_tokens,
            total_draft_tokens=found.num_draft_tokens,
        ),
        # TensorRT-LLM's begin with 0, those of the engine with 1.
        first_iter=found.first_iteration - 1 if has_tokens else None,
        last_iter=found.last_iteration - 1 if has_tokens and result.is_sequence_final else None,
        iter=found.last_iteration - 1 if has_tokens else None,
    )


def _time(nanoseconds: int) -> timedelta:
    return timedelta(microseconds=nanoseconds / 1000)
