"""The responses to clients: `Response` and the `Result` in it."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from inflight.executor.enums import FinishReason
from inflight.executor.errors import ExecutorError, InvalidValue
from inflight.executor.request import ContextPhaseParams

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class AdditionalOutput:
    """A tensor of the model that a request asked for, with the name it has there."""

    name: str
    output: torch.Tensor


@dataclass
class SpeculativeDecodingFastLogitsInfo:
    """The source of a draft's logits, when a draft engine sends them itself."""

    draft_request_id: int = 0
    draft_participant_id: int = 0

    def to_tensor(self) -> torch.Tensor:
        """The two numbers as TensorRT-LLM packs them into a float32 tensor [1, 4]: 8 bytes, 4 bytes, padding."""
        import torch

        packed = bytearray(struct.pack("=Qi4x", self.draft_request_id, self.draft_participant_id))
        return torch.frombuffer(packed, dtype=torch.float32).reshape(1, -1)


@dataclass
class TimingMetrics:
    """When things happened to a request, on a monotonic clock; zero for what has not happened yet.

    Attributes:
        kv_cache_transfer_start, kv_cache_transfer_end, kv_cache_size: Of disaggregated serving; zero here.
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
    """KV blocks of a request's known tokens: taken, found in the cache, and looked for in vain."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    """Draft tokens that were verified and accepted, and the part of them that was."""

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
    """Outputs of one sequence of a request, or of the beams of a search, best first.

    Attributes:
        is_final: Whether this is the request's last result.
        output_token_ids: By beam. Not streaming: the prompt, unless excluded, and everything generated. Streaming:
            what is new, or everything generated with return_all_generated_tokens.
        cum_log_probs: By beam, of everything generated so far.
        log_probs: By beam, of every generated token in `output_token_ids`.
        context_logits: [prompt tokens, vocab_size].
        generation_logits: Not streaming [beams, max_tokens, vocab_size]; streaming [tokens, beams, vocab_size].
        spec_dec_fast_logits_info: Where a draft's logits are to be fetched from.
        encoder_output: Hidden states of an encoder.
        finish_reasons: By beam.
        sequence_index: Which of num_return_sequences.
        is_sequence_final: Whether this is the sequence's last result.
        decoding_iter: Iterations that gave it tokens.
        avg_decoded_tokens_per_iter: Tokens of such an iteration.
        context_phase_params: For the server that generates.
        request_perf_metrics: Times and counts.
        additional_outputs: Tensors of the model.
    """

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: torch.Tensor | None = None
    generation_logits: torch.Tensor | None = None
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = None
    encoder_output: torch.Tensor | None = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float = 0.0
    context_phase_params: ContextPhaseParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[AdditionalOutput] = field(default_factory=list)


class Response:
    """One answer to a request: a result, or why there is none."""

    def __init__(
        self,
        request_id: int,
        error_msg: str | Result | None = None,
        client_id: int | None = None,
        *,
        result: Result | None = None,
    ) -> None:
        """The second argument is an error message or a result; by keyword, `error_msg` or `result`."""
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
        """The id of the request that the response is for."""
        return self._request_id

    @property
    def client_id(self) -> int | None:
        """The request's client_id."""
        return self._client_id

    def has_error(self) -> bool:
        """Whether there is an error instead of a result."""
        return isinstance(self._outcome, str)

    @property
    def error_msg(self) -> str:
        """The reason why the request failed; raises ExecutorError if it did not."""
        if isinstance(self._outcome, Result):
            raise ExecutorError("Cannot get the error message for a response without error")
        return self._outcome

    @property
    def result(self) -> Result:
        """The result; raises ExecutorError if the request failed."""
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


# Everything that a serialized result may consist of, beside tensors and what Python has built in.
_PARTS = [
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
    """The bytes from which `deserialize_result` makes an equal result, in this process or another."""
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def deserialize_result(data: bytes) -> Result:
    """The result that `serialize_result` made `data` of.

    Nothing but results and their parts can come out, so `data` may be from somebody who is not trusted. Raises
    InvalidValue for anything else, such as what TensorRT-LLM's C++ wrote.
    """
    import torch

    if not data.startswith(b"PK"):  # torch writes zip files
        raise InvalidValue(f"these {len(data)} bytes are no serialized Result")
    try:
        with torch.serialization.safe_globals(_PARTS):
            result = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # arbitrary bytes make torch raise arbitrary errors
        raise InvalidValue(f"these {len(data)} bytes are no serialized Result: {error}") from error
    if not isinstance(result, Result):
        raise InvalidValue(f"these {len(data)} bytes are no Result but of type {type(result).__name__}")
    return cast("Result", result)
