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
        name: Its `lora_name` in requests; "" for one with a task id.
        task_id: Its `lora_task_id` in requests; None for one with a name.
        path: Its folder on the server; "" for one sent by a client.
        is_loaded: Whether the server has it in memory. If not, its first request loads it.
        rank: Its largest rank; 0 while it is not loaded.
        num_bytes: Its size in the server's memory, in bytes.
    """

    name: str = ""
    task_id: int | None = None
    path: str = ""
    is_loaded: bool = True
    rank: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class PerfMetrics:
    """Times and KV cache counts of a sequence. Times are the server's monotonic clock in ns; 0 if not reached yet.

    Attributes:
        arrival_time_ns: The request was queued.
        first_scheduled_time_ns: Its first iteration began.
        first_token_time_ns: The first token was generated.
        last_token_time_ns: The last token was generated.
        kv_cache_alloc_new_blocks: KV blocks allocated for its prompt.
        kv_cache_reused_blocks: KV blocks found in the cache.
        kv_cache_missed_blocks: Full blocks of known tokens not found in the cache.
        kv_cache_alloc_total_blocks: Equal to kv_cache_alloc_new_blocks.
        total_draft_tokens: Draft tokens verified.
        total_accepted_draft_tokens: Draft tokens accepted.
        acceptance_rate: Accepted / verified.
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
    """One answer, or the part of it in a delta. Fields that were not requested are empty or None.

    Attributes:
        text: Generated text, if the prompt was a text.
        token_ids: Generated ids, if the prompt was ids.
        finish_reason: NOT_FINISHED until the last delta; then END_ID, STOP_WORDS, LENGTH, TIMED_OUT or CANCELLED.
        log_probs: The log probability of each generated token. All log probabilities are the model's own, before
            any option changes them.
        cum_log_prob: Their sum over all tokens so far; for a beam, the sum that the search ranks it by.
        top_log_probs: The most likely tokens at the position of each generated token.
        generation_logits: [tokens, vocab_size] float32, the logits that each token was sampled from.
        perf_metrics: Times, and counts of KV blocks and draft tokens.
        additional_outputs: By the output's name, `generation_<name>`, [tokens, width] float32: a row for the
            position that each token was sampled at.
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
    """Access to the first sequence's values: those of the only sequence, the first of several, or the best
    beam."""

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

    It continues earlier deltas of the same sequence, unless it is cumulative: the beams of a search change as it
    goes on, so each of its responses has everything so far, best beam first.

    Attributes:
        sequences: One sequence; for a beam search, its beams.
        sequence_index: Index among num_return_sequences.
        is_cumulative: Whether it replaces the previous delta instead of continuing it.
        prompt_log_probs: Log probability of each prompt token, the first 0.
        context_logits: [prompt tokens, vocab_size] float32. Like prompt_log_probs in every delta of a sequence,
            or, if large, only in the first.
        context_outputs: By the output's name, `context_<name>`, [prompt tokens, width] float32; only in a
            sequence's first delta.
    """

    sequences: tuple[Sequence, ...] = ()
    sequence_index: int = 0
    is_cumulative: bool = False
    prompt_log_probs: tuple[float, ...] = ()
    context_logits: np.ndarray | None = field(default=None, compare=False, repr=False)
    context_outputs: Mapping[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray], compare=False, repr=False
    )


@dataclass(frozen=True)
class Completion(_FirstSequence):
    """A whole answer, without the prompt.

    Attributes:
        sequences: One, or num_return_sequences of them in order, or the beams, best first.
        prompt_log_probs: Log probability of each prompt token, the first 0.
        context_logits: [prompt tokens, vocab_size] float32.
        context_outputs: See Delta.
    """

    sequences: tuple[Sequence, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    context_logits: np.ndarray | None = field(default=None, compare=False, repr=False)
    context_outputs: Mapping[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray], compare=False, repr=False
    )


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
    )


def _sequences(deltas: list[Delta]) -> tuple[Sequence, ...]:
    """Return the sequences that deltas of one sequence, or of one beam search, form."""
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
