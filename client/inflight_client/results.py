"""Results of requests: deltas of a stream, and the completions that they form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

NOT_FINISHED = "NOT_FINISHED"


class TopLogProb(NamedTuple):
    """One of the most likely tokens at a position."""

    token_id: int
    log_prob: float


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that requests can use.

    Attributes:
        name: The adapter's `lora_name` in requests; "" if it has a task id.
        task_id: The adapter's `lora_task_id` in requests; None if it has a name.
        path: The adapter's folder on the server; "" if a client sent it.
        is_loaded: Whether the server has the adapter in memory. If not, the next request with it loads it.
        rank: The adapter's largest rank; 0 while it is not loaded.
        num_bytes: The adapter's size in the server's memory, in bytes.
    """

    name: str = ""
    task_id: int | None = None
    path: str = ""
    is_loaded: bool = True
    rank: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class PerfMetrics:
    """Times and KV cache counts of a sequence.

    Times are in nanoseconds of the server's monotonic clock; 0 if the event has not happened yet.

    Attributes:
        arrival_time_ns: When the request was queued.
        first_scheduled_time_ns: When the request's first iteration began.
        first_token_time_ns: When the first token was generated.
        last_token_time_ns: When the last token was generated.
        kv_cache_alloc_new_blocks: Number of KV blocks allocated for the prompt.
        kv_cache_reused_blocks: Number of KV blocks found in the cache.
        kv_cache_missed_blocks: Number of full blocks of the prompt that were not found in the cache.
        kv_cache_alloc_total_blocks: Equal to kv_cache_alloc_new_blocks.
        total_draft_tokens: Number of verified draft tokens.
        total_accepted_draft_tokens: Number of accepted draft tokens.
        acceptance_rate: Accepted draft tokens / verified draft tokens.
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0
    kv_cache_missed_blocks: int = 0
    kv_cache_alloc_total_blocks: int = 0
    total_draft_tokens: int = 0
    total_accepted_draft_tokens: int = 0
    acceptance_rate: float = 0.0


@dataclass(frozen=True)
class Sequence:
    """One answer, or the part of an answer in a delta. Fields that were not requested are empty or None.

    Attributes:
        text: Generated text, if the prompt was a text.
        token_ids: Generated ids, if the prompt was ids.
        finish_reason: NOT_FINISHED until the last delta; then END_ID, STOP_WORDS, LENGTH, TIMED_OUT or CANCELLED.
        log_probs: The log probability of each generated token. All log probabilities are the model's own, before
            any option changes them.
        cum_log_prob: Sum of the log probabilities of all tokens so far; for a beam, the sum by which the
            search ranks beams.
        top_log_probs: The most likely tokens at the position of each generated token.
        generation_logits: [tokens, vocab_size] float32, the logits that each token was sampled from.
        perf_metrics: Times, and counts of KV blocks and draft tokens.
        additional_outputs: Arrays [tokens, width] float32 by name, `generation_<name>`: one row for each
            token, at the position from which it was sampled.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = NOT_FINISHED
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float | None = None
    top_log_probs: tuple[tuple[TopLogProb, ...], ...] = ()
    generation_logits: np.ndarray | None = field(default=None, compare=False, repr=False)
    perf_metrics: PerfMetrics | None = None
    additional_outputs: Mapping[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray], compare=False, repr=False
    )


class _FirstSequence:
    """Properties with the values of the first sequence, which for a beam search is the best beam."""

    sequences: tuple[Sequence, ...]

    @property
    def text(self) -> str:
        """Generated text of the first sequence."""
        return self._first.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated ids of the first sequence."""
        return self._first.token_ids

    @property
    def finish_reason(self) -> str:
        """Reason of the first sequence's end; NOT_FINISHED until then."""
        return self._first.finish_reason

    @property
    def log_probs(self) -> tuple[float, ...]:
        """Log probability of each of the first sequence's tokens."""
        return self._first.log_probs

    @property
    def cum_log_prob(self) -> float | None:
        """Sum of the log probabilities of the first sequence's tokens so far."""
        return self._first.cum_log_prob

    @property
    def top_log_probs(self) -> tuple[tuple[TopLogProb, ...], ...]:
        """The most likely tokens at each of the first sequence's positions."""
        return self._first.top_log_probs

    @property
    def generation_logits(self) -> np.ndarray | None:
        """[tokens, vocab_size] float32, the logits of the first sequence."""
        return self._first.generation_logits

    @property
    def perf_metrics(self) -> PerfMetrics | None:
        """Times and counts of the first sequence's request."""
        return self._first.perf_metrics

    @property
    def additional_outputs(self) -> Mapping[str, np.ndarray]:
        """Additional outputs of the first sequence, by name."""
        return self._first.additional_outputs

    @property
    def _first(self) -> Sequence:
        return self.sequences[0] if self.sequences else Sequence()


@dataclass(frozen=True)
class Delta(_FirstSequence):
    """The content of one response of the server.

    A delta continues earlier deltas of the same sequence. But the beams of a beam search change while it
    runs, so its deltas are cumulative: each has everything so far, with the best beam first.

    Attributes:
        sequences: One sequence; for a beam search, its beams.
        sequence_index: Index among num_return_sequences.
        is_cumulative: Whether the delta replaces the previous delta instead of continuing it.
        prompt_log_probs: Log probability of each prompt token; 0 for the first. In every delta of a
            sequence, or if large, only in the first.
        context_logits: [prompt tokens, vocab_size] float32. In every delta of a sequence, or if large, only
            in the first.
        context_outputs: Arrays [prompt tokens, width] float32 by name, `context_<name>`; only in a
            sequence's first delta.
        receipt: The request's receipt as JSON, in its last delta; "" if not requested.
    """

    sequences: tuple[Sequence, ...] = ()
    sequence_index: int = 0
    is_cumulative: bool = False
    prompt_log_probs: tuple[float, ...] = ()
    context_logits: np.ndarray | None = field(default=None, compare=False, repr=False)
    context_outputs: Mapping[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray], compare=False, repr=False
    )
    receipt: str = ""


@dataclass(frozen=True)
class Completion(_FirstSequence):
    """A whole answer, without the prompt.

    Attributes:
        sequences: One sequence; or num_return_sequences sequences in order; or the beams, best first.
        prompt_log_probs: Log probability of each prompt token; 0 for the first.
        context_logits: [prompt tokens, vocab_size] float32.
        context_outputs: As in Delta.
        receipt: As in Delta.
    """

    sequences: tuple[Sequence, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    context_logits: np.ndarray | None = field(default=None, compare=False, repr=False)
    context_outputs: Mapping[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray], compare=False, repr=False
    )
    receipt: str = ""


def completion(deltas: Iterable[Delta]) -> Completion:
    """Join `deltas` of one request into a Completion."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.sequence_index, []).append(delta)
    groups = [by_index[index] for index in sorted(by_index)]
    everything = [delta for group in groups for delta in group]
    return Completion(
        sequences=tuple(sequence for group in groups for sequence in _sequences(group)),
        prompt_log_probs=next((delta.prompt_log_probs for delta in everything if delta.prompt_log_probs), ()),
        context_logits=next((d.context_logits for d in everything if d.context_logits is not None), None),
        context_outputs=next((delta.context_outputs for delta in everything if delta.context_outputs), {}),
        receipt=next((delta.receipt for delta in everything if delta.receipt), ""),
    )


def _sequences(deltas: list[Delta]) -> tuple[Sequence, ...]:
    """Join the deltas of one sequence, or of one beam search; return the sequence, or the beams."""
    last = deltas[-1]
    if last.is_cumulative or len(last.sequences) != 1:
        return last.sequences
    parts = [delta.sequences[0] for delta in deltas]
    logits = [part.generation_logits for part in parts if part.generation_logits is not None]
    joined = Sequence(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=parts[-1].finish_reason,
        log_probs=tuple(value for part in parts for value in part.log_probs),
        cum_log_prob=parts[-1].cum_log_prob,
        top_log_probs=tuple(top for part in parts for top in part.top_log_probs),
        generation_logits=np.concatenate(logits) if logits else None,
        perf_metrics=parts[-1].perf_metrics,
        additional_outputs={
            name: np.concatenate([part.additional_outputs[name] for part in parts])
            for name in parts[0].additional_outputs
        },
    )
    return (joined,)
