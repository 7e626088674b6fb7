"""The class `Response`, and the class `Result` of its outputs."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from inflight.executor.enums import FinishReason
from inflight.executor.errors import ExecutorError, InvalidValue
from inflight.executor.request import ContextPhaseParams

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class AdditionalOutput:
    """A requested tensor of the model, with its name."""

    name: str
    output: torch.Tensor


@dataclass
class SpeculativeDecodingFastLogitsInfo:
    """The source of a draft's logits, if a draft engine sends them."""

    draft_request_id: int = 0
    draft_participant_id: int = 0

    def to_tensor(self) -> torch.Tensor:
        """Pack the two numbers as in TensorRT-LLM: float32 [1, 4] that holds 8 bytes, 4 bytes and padding."""
        import torch

        packed = bytearray(struct.pack("=Qi4x", self.draft_request_id, self.draft_participant_id))
        return torch.frombuffer(packed, dtype=torch.float32).reshape(1, -1)


@dataclass
class TimingMetrics:
    """Times of a request's events on a monotonic clock; zero for events that have not happened.

    Attributes:
        kv_cache_transfer_start, kv_cache_transfer_end, kv_cache_size: For disaggregated serving; always zero.
    """

    arrival_time: timedelta = timedelta(0)
    first_scheduled_time: timedelta = timedelta(0)
    first_token_time: timedelta = timedelta(0)
    last_token_time: timedelta = timedelta(0)
    kv_cache_transfer_start: timedelta = timedelta(0)
    kv_cache_transfer_end: timedelta = timedelta(0)
    kv_cache_size: int = 0


@dataclass
class KvCacheMetrics:
    """Numbers of KV blocks for a request's known tokens: allocated, found in the cache, and missed."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    """Numbers of verified and accepted draft tokens, and their ratio."""

    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    """Times and counts of a request.

    Attributes:
        first_iter: Iteration of the first token.
        last_iter: Iteration of the last token; None until then.
        iter: Iteration of this response.
    """

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass(eq=False)
class Result:
    """Outputs of one sequence, or of the beams of a search, best first.

    Attributes:
        is_final: Whether this is the request's last result.
        output_token_ids: Token ids by beam. If the request does not stream: the prompt, unless excluded, and
            all generated tokens. If it streams: the new tokens, or with return_all_generated_tokens all
            generated tokens.
        cum_log_probs: Sum of log probs of all generated tokens so far, by beam.
        log_probs: Log prob of every generated token in `output_token_ids`, by beam.
        context_logits: [prompt tokens, vocab_size].
        generation_logits: Not streaming [beams, max_tokens, vocab_size]; streaming [tokens, beams, vocab_size].
        spec_dec_fast_logits_info: Source of a draft's logits.
        encoder_output: Hidden states of an encoder.
        finish_reasons: Finish reasons by beam.
        sequence_index: Index of the sequence among num_return_sequences.
        is_sequence_final: Whether this is the sequence's last result.
        decoding_iter: Number of iterations that generated tokens of the sequence.
        avg_decoded_tokens_per_iter: Average number of generated tokens in each of these iterations.
        context_phase_params: State for the generation server.
        request_perf_metrics: Times and counts.
        additional_outputs: Requested tensors of the model.
        receipt: The request's receipt as JSON, in its last result. Not in TensorRT-LLM.
    """

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list[list[int]])
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: torch.Tensor | None = None
    generation_logits: torch.Tensor | None = None
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = None
    encoder_output: torch.Tensor | None = None
    finish_reasons: list[FinishReason] = field(default_factory=list[FinishReason])
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float = 0.0
    context_phase_params: ContextPhaseParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[AdditionalOutput] = field(default_factory=list[AdditionalOutput])
    receipt: str | None = None


class Response:
    """One response to a request: a result or an error."""

    def __init__(
        self,
        request_id: int,
        error_msg: str | Result | None = None,
        client_id: int | None = None,
        *,
        result: Result | None = None,
    ) -> None:
        """Create a response with an error message or a result. The second argument may be either."""
        outcome = error_msg if result is None else result
        if outcome is None or (error_msg is not None and result is not None):
            raise TypeError("a Response has either an error_msg or a result")
        if outcome == "":
            raise InvalidValue("Error message should not be empty")
        self._request_id = request_id
        self._outcome = outcome
        self._client_id = client_id

    def __repr__(self) -> str:
        return f"Response({self._request_id}, {self._outcome!r}, {self._client_id})"

    @property
    def request_id(self) -> int:
        """The id that `enqueue_request` returned for the request."""
        return self._request_id

    @property
    def client_id(self) -> int | None:
        """The `client_id` that the caller gave the request; None without one."""
        return self._client_id

    def has_error(self) -> bool:
        """Return whether there is an error instead of a result."""
        return isinstance(self._outcome, str)

    @property
    def error_msg(self) -> str:
        """Return the reason why the request failed; raise ExecutorError if it did not fail."""
        if isinstance(self._outcome, Result):
            raise ExecutorError("Cannot get the error message for a response without error")
        return self._outcome

    @property
    def result(self) -> Result:
        """Return the result; raise ExecutorError if the request failed."""
        if isinstance(self._outcome, str):
            raise ExecutorError(f"Cannot get the result for a response with an error: {self._outcome}")
        return self._outcome

    def clear_context_logits(self) -> None:
        """Drop the result's context logits, if there is a result."""
        if isinstance(self._outcome, Result):
            self._outcome.context_logits = None

    def clear_generation_logits(self) -> None:
        """Drop the result's generation logits, if there is a result."""
        if isinstance(self._outcome, Result):
            self._outcome.generation_logits = None


# All classes that may be in a serialized result, besides tensors and Python's built-in types.
_PARTS: list[Any] = [
    AdditionalOutput,
    ContextPhaseParams,
    FinishReason,
    KvCacheMetrics,
    RequestPerfMetrics,
    Result,
    SpeculativeDecodingFastLogitsInfo,
    SpeculativeDecodingMetrics,
    TimingMetrics,
    timedelta,
]


def serialize_result(result: Result) -> bytes:
    """Serialize a result; `deserialize_result` restores it, in this process or another."""
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def deserialize_result(data: bytes) -> Result:
    """Restore the result that `serialize_result` serialized.

    Only results and their parts can be created, so `data` need not be trusted. Raises InvalidValue for any
    other data, such as results serialized by TensorRT-LLM's C++ code.
    """
    import torch

    if not data.startswith(b"PK"):  # torch writes zip files
        raise InvalidValue(f"these {len(data)} bytes are not a serialized Result")
    try:
        with torch.serialization.safe_globals(_PARTS):
            result = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # arbitrary bytes make torch raise arbitrary errors
        raise InvalidValue(f"these {len(data)} bytes are not a serialized Result: {error}") from error
    if not isinstance(result, Result):
        raise InvalidValue(f"these {len(data)} bytes are not a Result but of type {type(result).__name__}")
    return result
