"""What was asked: a frozen Request, and the one value through which the outside enters an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.core.output_config import OutputConfig
from inflight.core.sampling_config import SamplingConfig
from inflight.core.stop import StopSignal
from inflight.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can take, known to every front end before it sends a request.

    Attributes:
        vocab_size: Number of token ids; valid ids are 0 .. vocab_size - 1.
        max_sequence_length: Prompt and generated tokens together, in tokens.
        max_input_length: Longest prompt, in tokens.
        max_kv_tokens: Tokens that the KV cache holds when one request has it to itself.
    """

    vocab_size: int
    max_sequence_length: int
    max_input_length: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a front end hands it over. Specification: Inference Request.

    Attributes:
        request_id: Unique among requests in flight, 0 .. 2**64 - 1.
        input_token_ids: The prompt. Tensor `input_ids` [1, num_input_tokens].
        max_new_tokens: Most tokens to generate, at least 1. Tensor `request_output_len` [1, 1].
        streaming: Respond at every iteration instead of once. Tensor `streaming`.
        end_ids: Token ids that end the sequence; they are not returned. Tensor `end_id`.
        pad_id: Fills ragged outputs of several beams; None means -1. Tensor `pad_id`.
        sampling: How tokens are chosen.
        output: What comes back.
    """

    request_id: int
    input_token_ids: tuple[int, ...]
    max_new_tokens: int
    streaming: bool = False
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_token_ids)

    @property
    def max_sequence_length(self) -> int:
        """Prompt and generated tokens at the length limit."""
        return len(self.input_token_ids) + self.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """KV entries needed at the length limit: the last generated token is never fed back."""
        return len(self.input_token_ids) + self.max_new_tokens - 1

    def validate(self, limits: ModelLimits) -> None:
        """Raise InvalidArgument, with what would fit, if this request can never run on such a model."""
        self.sampling.validate()
        if not self.input_token_ids:
            raise InvalidArgument("input_ids is empty: a request needs at least one prompt token")
        if self.max_new_tokens < 1:
            raise InvalidArgument(f"request_output_len must be at least 1, got {self.max_new_tokens}")
        self._validate_ids(limits.vocab_size)
        self._validate_lengths(limits)

    def _validate_ids(self, vocab_size: int) -> None:
        low, high = min(self.input_token_ids), max(self.input_token_ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidArgument(
                f"input_ids must be in [0, {vocab_size - 1}], got {wrong} "
                f"at position {self.input_token_ids.index(wrong)}"
            )
        for end_id in self.end_ids:
            if not 0 <= end_id < vocab_size:
                raise InvalidArgument(f"end_id must be in [-1, {vocab_size - 1}] (-1: none), got {end_id}")

    def _validate_lengths(self, limits: ModelLimits) -> None:
        if self.prompt_length > limits.max_input_length:
            raise InvalidArgument(
                f"input_ids has {self.prompt_length} tokens; this server takes prompts of at most "
                f"{limits.max_input_length} tokens"
            )
        room = limits.max_sequence_length - self.prompt_length
        if self.max_new_tokens > room:
            raise InvalidArgument(
                f"request_output_len is {self.max_new_tokens}, but after {self.prompt_length} prompt tokens at "
                f"most {max(room, 0)} fit in the model's sequence length of {limits.max_sequence_length}"
            )
        if self.max_kv_tokens > limits.max_kv_tokens:
            fits = limits.max_kv_tokens - self.prompt_length + 1
            raise InvalidArgument(
                f"{self.prompt_length} prompt tokens and request_output_len {self.max_new_tokens} need "
                f"{self.max_kv_tokens} tokens of KV cache; it holds {limits.max_kv_tokens}, "
                f"so request_output_len can be at most {max(fits, 0)}"
            )


@dataclass(frozen=True, slots=True)
class IterationInput:
    """Everything that enters one iteration and is not a function of earlier state.

    Rank 0 makes it inside GetInferenceRequests. It is what a broadcast carries to other ranks and what a
    recording would keep; `now_ns` is the only clock the core sees.

    Attributes:
        iteration: Count of iterations, from 0.
        now_ns: Monotonic time of this iteration, in nanoseconds.
        new_requests: Requests that arrive with this iteration, in order.
        stops: Requests to end early.
    """

    iteration: int
    now_ns: int
    new_requests: tuple[Request, ...] = ()
    stops: tuple[StopSignal, ...] = ()
