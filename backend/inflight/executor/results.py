"""Convert the engine's responses to responses of the Executor API, including values of earlier responses.

Each request has an `Answers` object. The engine's thread adds responses to it, which costs little. The
thread that fetches an `EngineAnswer` converts it to a `Response`, including tensors. Answers to one request
may be converted in any order.
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
from inflight.receipts.writer import ReceiptWriter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The parts of a request on which its responses depend.

    Attributes:
        streaming: Whether every iteration gives a response.
        repeats_tokens: Whether streamed responses have all tokens generated so far.
        max_tokens: Largest number of tokens to generate.
        vocab_size: Width of logits.
        client_id: Number of the client, which every response has.
        output: Outputs to return.
        tokens_per_block: Number of tokens in a KV block.
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
        """Return whether a response includes values of earlier responses."""
        output = self.output
        return self.streaming and (
            self.repeats_tokens or output.return_log_probs or output.return_context_logits
        )


class Answers:
    """The answers to one request.

    Attributes:
        asked: The parts of the request on which the answers depend.
        num_sequences: Number of sequences as which the request counts in the queue.
        receipt: Writer of the receipt; None: no receipt.
        have_ended: Whether the final answer has arrived. Guarded by the lock of `EnqueuedRequests`.
    """

    def __init__(
        self, asked: ResponseOptions, num_sequences: int, receipt: ReceiptWriter | None = None
    ) -> None:
        self.receipt = receipt
        self.asked = asked
        self.num_sequences = num_sequences
        self.have_ended = False
        self._history: dict[int, list[core_response.SequenceResult]] = {}  # by sequence index, if needed
        self._num_generated: dict[int, int] = {}  # by sequence index

    def add(self, response: core_response.Response) -> EngineAnswer:
        """Convert the engine's next response to an answer. Must be called by one thread at a time."""
        result = response.result
        if result is None:
            return self._answer(response, (), 0)
        if self.receipt is not None:
            self.receipt.add(result, result.receipt, result.is_sequence_final)
        index, count = result.sequence_index, result.num_output_tokens[0]
        if not result.is_cumulative:
            count += self._num_generated.get(index, 0)
        self._num_generated[index] = count
        if not self.asked.looks_back:
            return self._answer(response, (), count)
        history = self._history.setdefault(index, [])
        if result.is_cumulative:
            # This result includes the earlier results, except the first one's context outputs.
            del history[1:]
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
    """A response of the engine, with the earlier values that the API's response includes.

    Attributes:
        answers: All answers to the request.
        so_far: The sequence's results up to this one, if responses include values of earlier ones.
        num_generated: Number of tokens that the sequence or best beam has generated so far.
    """

    answers: Answers
    so_far: Sequence[core_response.SequenceResult]
    num_generated: int

    def to_response(self) -> Response:
        """Convert the answer to a response of the Executor API."""
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
            receipt=self._receipt(),
        )

    def _receipt(self) -> str | None:
        writer = self.answers.receipt
        return writer.write() if writer is not None and self.is_final and writer.is_complete else None


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
    """Return generation logits: [tokens, beams, vocab_size] if the request streams, else padded with 0.

    The padded shape is [beams, max_tokens, vocab_size].
    """
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
    """Return the named tensors `context_…` [prompt tokens, width] and `generation_…` [1, tokens, width]."""
    if not any(each.additional_outputs for each in results):
        return []
    import torch

    rows: dict[str, list[torch.Tensor]] = {}
    for output in chain.from_iterable(each.additional_outputs for each in results):
        (tensor,) = output.tensors  # there is one tensor, as a beam search has no such outputs
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
    # TensorRT-LLM also counts the prompt's last block, even if it is not full.
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
        # TensorRT-LLM's iteration numbers begin with 0, the engine's with 1.
        first_iter=found.first_iteration - 1 if has_tokens else None,
        last_iter=found.last_iteration - 1 if has_tokens and result.is_sequence_final else None,
        iter=found.last_iteration - 1 if has_tokens else None,
    )


def _time(nanoseconds: int) -> timedelta:
    return timedelta(microseconds=nanoseconds / 1000)
