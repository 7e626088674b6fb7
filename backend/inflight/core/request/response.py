"""Responses to front ends, and merging several waiting responses of a sequence into one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from inflight.core.request.request import FloatTensor
from inflight.core.request.stop import CUT_SHORT, FinishReason
from inflight.errors import InflightError

_T = TypeVar("_T")
_R = TypeVar("_R", bound="Response")


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """Times and counts of a sequence. Times are monotonic nanoseconds; 0 if the event has not happened yet.

    Attributes:
        arrival_time_ns: When the request was queued. Output `arrival_time_ns`.
        first_scheduled_time_ns: When its first iteration began. Output `first_scheduled_time_ns`.
        first_token_time_ns: When the first token was sampled. Output `first_token_time_ns`.
        last_token_time_ns: When the last token was sampled; 0 until the sequence ends. Output
            `last_token_time_ns`.
        num_new_blocks: KV blocks taken for the tokens known when the sequence started or resumed; blocks
            for tokens generated later are not counted. Output `kv_cache_alloc_new_blocks`.
        num_reused_blocks: KV blocks found in the cache. Output `kv_cache_reused_blocks`.
        num_missed_blocks: Full blocks of known tokens not found in the cache. Output `kv_cache_missed_blocks`.
        num_draft_tokens: Number of verified draft tokens. Output `total_draft_tokens`.
        num_accepted_draft_tokens: Number of accepted draft tokens, except those after the sequence's end. Output
            `total_accepted_draft_tokens`.
        first_iteration, last_iteration: The iterations of the first and the latest token.
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    num_new_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    first_iteration: int = 0
    last_iteration: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The fraction of verified draft tokens that were accepted; 0 without drafts."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def cached_tokens(self, prompt_length: int, tokens_per_block: int) -> int:
        """Return how many of a prompt's tokens were found in the KV cache, in whole blocks."""
        # The last reused block may match only in part, to an unknown length, so only whole blocks count.
        num_whole = min(self.num_reused_blocks, prompt_length // tokens_per_block - self.num_missed_blocks)
        return min(max(num_whole, 0) * tokens_per_block, prompt_length - 1)


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The most likely tokens at one position, most likely first.

    Attributes:
        token_ids: The tokens, num_top_log_probs of them.
        log_probs: The log probability of each of `token_ids`.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReturnedOutput:
    """TensorRT-LLM's `AdditionalOutput`, with one tensor per sequence or beam of the result.

    Attributes:
        name: `context_` or `generation_` and the output's name.
        tensors: Each [n, width]. A `context_` output has one tensor, with a row per prompt token. A `generation_`
            output has one tensor per beam of the result (one without beams), with a row per token in this
            response, from the position at which the token was sampled. [0, 0] if there are no rows.
    """

    name: str
    tensors: tuple[FloatTensor, ...]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """TensorRT-LLM's `Result` for one sequence, or for the beams of one search, best first.

    Attributes:
        output_token_ids: For each beam (one, if there are no beams), token ids. Streaming: the tokens since
            the last response; with beams, all tokens generated so far. Otherwise: the prompt, unless excluded,
            and all generated tokens. End ids are not returned. Tensor `output_ids`.
        num_input_tokens: Number of prompt tokens. Tensor `num_input_tokens`.
        num_output_tokens: For each beam, the number of generated tokens at the end of its ids. Tensor
            `num_output_tokens`.
        finish_reasons: The reason for each beam; NOT_FINISHED until its last response. Tensor `finish_reason`.
        sequence_index: Index among num_return_sequences; 0 for a beam search. Tensor `sequence_index`.
        is_sequence_final: Whether this is the sequence's last response.
        is_cumulative: Whether the result has all tokens so far, as with streamed beams, instead of new
            tokens only.
        log_probs: For each beam, the log probability of each generated token in this response; None if not wanted.
            Tensor `output_log_probs`.
        model_log_probs: For each beam, the model's own log probabilities of these tokens, if `log_probs`
            are taken from the distribution from which the tokens were sampled; None if `log_probs` are the
            model's own.
        cum_log_probs: For each beam, the sum of the log probabilities of all tokens generated so far. Without
            beam search, they are the model's own. With beam search, they are after penalties, bias and
            temperature, and include the end id's: the beam's score before division by
            length ** length_penalty. Tensor `cum_log_probs`.
        top_log_probs: For each beam, the most likely tokens at each generated token in this response. Tensors
            `top_log_prob_ids` and `top_log_probs`.
        prompt_log_probs: The log probability of each prompt token, the first 0.0; only in the sequence's first
            response.
        context_logits: [prompt tokens, vocab_size]; only in the sequence's first response. If the sequence was
            stopped within its prompt, context_logits and prompt_log_probs have only the rows that were computed.
        generation_logits: For each beam [tokens in this response, vocab_size], or [0, 0] without tokens; None for
            streamed beams.
        perf_metrics: Times and counts; None if not wanted.
        additional_outputs: The tensors named in the request's `OutputConfig.additional_outputs`; tensors of the
            prompt only in the sequence's first response.
        num_iterations: Number of iterations in which the sequence got tokens so far.
        receipt: The request's receipt as JSON, in its last response; from the engine, only the engine's part.
            Tensor `receipt`.
    """

    output_token_ids: tuple[tuple[int, ...], ...]
    num_input_tokens: int
    num_output_tokens: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    sequence_index: int = 0
    is_sequence_final: bool = False
    is_cumulative: bool = False
    log_probs: tuple[tuple[float, ...], ...] | None = None
    cum_log_probs: tuple[float, ...] | None = None
    top_log_probs: tuple[tuple[TopLogProbs, ...], ...] | None = None
    prompt_log_probs: tuple[float, ...] | None = None
    context_logits: FloatTensor | None = None
    generation_logits: tuple[FloatTensor, ...] | None = None
    perf_metrics: PerfMetrics | None = None
    model_log_probs: tuple[tuple[float, ...], ...] | None = None
    additional_outputs: tuple[ReturnedOutput, ...] = ()
    num_iterations: int = 0
    receipt: str | None = None

    @property
    def carries_tokens_only(self) -> bool:
        """Whether the result has new tokens and nothing else."""
        return (
            self.log_probs is None
            and self.top_log_probs is None
            and self.context_logits is None
            and self.prompt_log_probs is None
            and self.generation_logits is None
            and self.perf_metrics is None
            and not self.is_cumulative
            and not self.additional_outputs
            and self.receipt is None
        )

    @property
    def num_tensor_bytes(self) -> int:
        """Size in bytes of the logits and additional outputs of this result's tokens."""
        tensors = chain(self.generation_logits or (), *(output.tensors for output in self.additional_outputs))
        return sum(len(tensor.data) for tensor in tensors)

    @property
    def was_cut_short(self) -> bool:
        """Whether the sequence was cancelled or timed out, so that it may be incomplete."""
        return self.finish_reasons[0] in CUT_SHORT


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """The scheduler's part of a request's line in the access log, of its trace and of its receipt.

    Attributes:
        num_output_tokens: Number of tokens generated in all sequences; of a beam search, its steps.
        finish_reasons: The finish reason of each sequence.
        first_token_ns: When the first token was sampled, in monotonic nanoseconds; 0: there is none.
        adapter_digest: Digest of the request's adapter; b"" without one.
        first_scheduled_ns: When its first iteration began; 0: it was not scheduled.
        last_token_ns: When the last token was sampled; 0: there is none.
    """

    num_output_tokens: int = 0
    finish_reasons: tuple[FinishReason, ...] = ()
    first_token_ns: int = 0
    adapter_digest: bytes = b""
    first_scheduled_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """One call of the SendResponse callback. Specification: Get and Send Callbacks.

    Attributes:
        request_id: The id of the request.
        result: The outputs of one of the request's sequences, or None with an error.
        error: The error if the request failed; then `is_final` is true.
        is_final: Whether this is the request's last response, after which its id may be used again.
        ending: The request's ending, in the scheduler's last response to it. Not sent to other processes.
    """

    request_id: int
    result: SequenceResult | None = None
    error: InflightError | None = None
    is_final: bool = False
    ending: RequestEnding | None = field(default=None, compare=False)

    @property
    def sequence_index(self) -> int:
        """Index of the request's sequence to which this response belongs; 0 for an error."""
        return self.result.sequence_index if self.result else 0


def merge_responses(responses: Sequence[_R]) -> _R:
    """Merge consecutive responses of one sequence into one; if the last response is an error, return only the
    error."""
    last = responses[-1]
    if len(responses) == 1 or last.result is None:
        return last
    results = [response.result for response in responses if response.result is not None]
    return replace(last, result=_merge(results))


def _merge(results: list[SequenceResult]) -> SequenceResult:
    last = results[-1]
    if last.carries_tokens_only and results[0].carries_tokens_only:
        return SequenceResult(
            _join([r.output_token_ids for r in results]),
            last.num_input_tokens,
            (sum(r.num_output_tokens[0] for r in results),),
            last.finish_reasons,
            last.sequence_index,
            last.is_sequence_final,
            num_iterations=last.num_iterations,
        )
    prompt_log_probs = next((r.prompt_log_probs for r in results if r.prompt_log_probs is not None), None)
    context_logits = next((r.context_logits for r in results if r.context_logits is not None), None)
    if last.is_cumulative:
        return replace(last, prompt_log_probs=prompt_log_probs, context_logits=context_logits)
    return replace(
        last,
        output_token_ids=_join([r.output_token_ids for r in results]),
        num_output_tokens=(sum(r.num_output_tokens[0] for r in results),),
        log_probs=None if last.log_probs is None else _join([r.log_probs or ((),) for r in results]),
        model_log_probs=(  # a response without tokens has no log probabilities
            _join([r.model_log_probs or ((),) for r in results])
            if any(r.model_log_probs is not None for r in results)
            else None
        ),
        top_log_probs=(
            None if last.top_log_probs is None else _join([r.top_log_probs or ((),) for r in results])
        ),
        prompt_log_probs=prompt_log_probs,
        context_logits=context_logits,
        generation_logits=_join_logits(results),
        additional_outputs=_join_additional(results),
    )


def _join(parts: Iterable[tuple[tuple[_T, ...], ...]]) -> tuple[tuple[_T, ...], ...]:
    """Concatenate the first beam of every part. Merged results have a single beam."""
    return (tuple(chain.from_iterable(part[0] for part in parts)),)


def _join_logits(results: list[SequenceResult]) -> tuple[FloatTensor, ...] | None:
    parts = [r.generation_logits[0] for r in results if r.generation_logits is not None]
    return (_concatenate_rows(parts),) if parts else None


def _join_additional(results: list[SequenceResult]) -> tuple[ReturnedOutput, ...]:
    parts: dict[str, list[FloatTensor]] = {}
    for output in chain.from_iterable(result.additional_outputs for result in results):
        parts.setdefault(output.name, []).append(output.tensors[0])
    return tuple(ReturnedOutput(name, (_concatenate_rows(each),)) for name, each in parts.items())


def _concatenate_rows(tensors: list[FloatTensor]) -> FloatTensor:
    """Concatenate tensors [n, …] along the first dimension; tensors with n = 0 may have any other dimensions."""
    filled = [tensor for tensor in tensors if tensor.data]
    if len(filled) <= 1:
        return filled[0] if filled else tensors[0]
    rows = sum(tensor.shape[0] for tensor in filled)
    return FloatTensor((rows, *filled[0].shape[1:]), b"".join(tensor.data for tensor in filled))
