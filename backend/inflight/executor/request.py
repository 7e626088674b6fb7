"""The class `Request`, and the classes of its optional parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from inflight.executor.enums import KvCacheTransferMode, Numbered, RequestType
from inflight.executor.errors import InvalidValue
from inflight.executor.sampling import OutputConfig, SamplingConfig
from inflight.executor.typed import POSITIVE, SHARE, Frozen, Range, Typed, also_called, required, within

if TYPE_CHECKING:
    import torch

LogitsPostProcessor = Callable[..., Any]
"""Callable with arguments (request id, logits, tokens so far, stream, client id). It may lack the last
argument."""

_PRIORITY = Range("between 0 and 100", lambda priority: 0 <= priority <= 100)
_TASK_ID = Range("in [0, 2**64)", lambda task_id: 0 <= task_id < 1 << 64)
_VECTOR = Range("a tensor of one dimension", lambda tensor: len(tensor.shape) == 1)


@dataclass(frozen=True, eq=False)
class ExternalDraftTokensConfig(Frozen):
    """Draft tokens for the first generated tokens, verified in one pass.

    Attributes:
        tokens: The draft tokens.
        logits: The logits that the draft tokens were sampled from, [len(tokens), vocab_size].
        acceptance_threshold: Used with `logits`: a token is accepted if its probability ratio target / draft
            is at least this number in [0, 1].
        fast_logits: Whether a draft engine sends the logits over MPI.
    """

    tokens: list[int]
    logits: torch.Tensor | None = None
    acceptance_threshold: float | None = within(None, SHARE)
    fast_logits: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens:
            raise InvalidValue("ExternalDraftTokensConfig.tokens is empty")
        if self.logits is not None and (len(self.logits.shape), self.logits.shape[0]) != (
            2,
            len(self.tokens),
        ):
            raise InvalidValue(
                f"ExternalDraftTokensConfig.logits must have shape [{len(self.tokens)}, vocab_size], got "
                f"{list(self.logits.shape)}"
            )


@dataclass(frozen=True, eq=False)
class PromptTuningConfig(Frozen):
    """A prompt table: token id vocab_size + i stands for its row i.

    Attributes:
        embedding_table: [rows, hidden_size], float32, float16 or bfloat16.
        input_token_extra_ids: One number for each prompt token, 0 for text. KV blocks are shared only if
            these numbers are equal, too. They need not distinguish tables, because the tables' contents are
            compared.
    """

    embedding_table: torch.Tensor
    input_token_extra_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.embedding_table.shape) != 2:
            raise InvalidValue(
                "Expected prompt embedding table to have 2 dimensions, [rows, hidden_size], got "
                f"{list(self.embedding_table.shape)}"
            )


@dataclass(frozen=True)
class MultimodalInput(Frozen):
    """Positions of images and other multimodal items in a prompt.

    Attributes:
        multimodal_hashes: Eight integers for each item.
        multimodal_positions: Position of each item's first token.
        multimodal_lengths: Number of tokens of each item.
    """

    multimodal_hashes: list[list[int]]
    multimodal_positions: list[int]
    multimodal_lengths: list[int]


@dataclass(frozen=True, eq=False)
class MropeConfig(Frozen):
    """Rotary positions of a prompt with pictures (multimodal rotary embedding, mRoPE).

    Attributes:
        mrope_rotary_cos_sin: float32, cosine and sine of each rotated pair of dimensions for each prompt token;
            [1, positions * rotary_dim] or any other shape.
        mrope_position_deltas: Number added to the position of each generated token.
    """

    mrope_rotary_cos_sin: torch.Tensor
    mrope_position_deltas: int


@dataclass(frozen=True, eq=False)
class LoraConfig(Frozen):
    """The adapter of a request.

    Attributes:
        task_id: Id of the adapter. Only the adapter's first request needs weights.
        weights: [rows, width] in float32, float16 or bfloat16, on the CPU.
        config: [rows, 3 or 4], int32, on the CPU: module, layer, rank, and optionally whether the row is
            DoRA.
    """

    task_id: int = required(_TASK_ID)
    weights: torch.Tensor | None = None
    config: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.weights is None) != (self.config is None):
            raise InvalidValue(
                "Request for LoRA inference with lora weights must also have lora config, and vice versa"
            )
        for name, tensor in (("weights", self.weights), ("config", self.config)):
            if tensor is not None and len(tensor.shape) != 2:
                raise InvalidValue(f"Expected {name} tensor to have 2 dimensions, got {list(tensor.shape)}")
            if tensor is not None and str(getattr(tensor, "device", "cpu")) != "cpu":
                raise InvalidValue(f"Expected lora {name} to be in CPU memory, got {tensor.device}")
        if self.config is not None and str(self.config.dtype).removeprefix("torch.") != "int32":
            raise InvalidValue(
                f"Expected lora config tensor to have type kINT32, got {self.config.dtype}: int32 is expected"
            )
        if self.weights is not None and self.config is not None and len(self.weights) != len(self.config):
            raise InvalidValue(
                "Expected dim 0 of lora weights and lora config to have the same size, got "
                f"{len(self.weights)} and {len(self.config)}"
            )


@dataclass(frozen=True)
class LookaheadDecodingConfig(Frozen):
    """Lookahead decoding: sizes of its window, its n-grams, and the set of n-grams verified at a time."""

    max_window_size: int
    max_ngram_size: int
    max_verification_set_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        window, ngram, guesses = self.max_window_size, self.max_ngram_size, self.max_verification_set_size
        if ngram < 1:
            raise InvalidValue("ngramSize requires >= 1")
        if window < 1:
            raise InvalidValue("windowSize requires >= 1")
        if guesses < 0:
            raise InvalidValue("verificationSetSize requires >=0")
        if ngram == 1 and guesses != 0:
            raise InvalidValue("ngramSize=1 requires verificationSetSize=0")
        if ngram == 1 and window != 1:
            raise InvalidValue("ngramSize=1 requires windowSize=1")

    def calculate_speculative_resource(self) -> tuple[int, int, int, int]:
        """Return (tokens, path, draft tokens, draft path).

        These are the maximum number of tokens in a pass, the length of the longest path, and both for draft
        tokens only.
        """
        return self.calculate_speculative_resource_tuple(
            self.max_window_size, self.max_ngram_size, self.max_verification_set_size
        )

    @staticmethod
    def calculate_speculative_resource_tuple(
        window_size: int, ngram_size: int, verification_set_size: int
    ) -> tuple[int, int, int, int]:
        """Return the result of `calculate_speculative_resource` for these sizes."""
        first = 0 if ngram_size == 1 else ngram_size - 2
        num_drafts = first + (window_size - 1 + verification_set_size) * (ngram_size - 1)
        return num_drafts + 1, ngram_size, num_drafts, ngram_size - 1

    @staticmethod
    def get_default_lookahead_decoding_window() -> int:
        """Return the default of max_window_size."""
        return 4

    @staticmethod
    def get_default_lookahead_decoding_ngram() -> int:
        """Return the default of max_ngram_size."""
        return 3

    @staticmethod
    def get_default_lookahead_decoding_verification_set() -> int:
        """Return the default of max_verification_set_size."""
        return 4


@dataclass(frozen=True)
class EagleConfig(Frozen):
    """Configuration of drafts from EAGLE heads."""

    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None


@dataclass(frozen=True)
class ContextPhaseParams(Frozen):
    """The state that a context server passes to a generation server."""

    first_gen_tokens: list[int]
    req_id: int
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None


@dataclass(frozen=True)
class GuidedDecodingParams(Frozen):
    """The guide of a request.

    Attributes:
        guide_type: Kind of `guide`.
        guide: JSON schema, regular expression, grammar or structural tag; not needed for GuideType.JSON.
    """

    class GuideType(Numbered):
        """Kinds of guided decoding: what `guide` contains."""

        JSON = 0
        JSON_SCHEMA = 1
        REGEX = 2
        EBNF_GRAMMAR = 3
        STRUCTURAL_TAG = 4

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guide is None and self.guide_type is not self.GuideType.JSON:
            raise InvalidValue("The guide string must be provided unless using GuideType::kJSON.")


@dataclass(frozen=True)
class KvCacheRetentionConfig(Frozen):
    """Retention of a request's KV blocks.

    Attributes:
        token_range_retention_configs: Ranges of the prompt; sorted by start at construction.
        decode_retention_priority: Priority of blocks of generated tokens.
        decode_duration_ms: How long this priority holds; None: forever.
        transfer_mode: How blocks are written to `directory`.
        directory: Folder to write blocks to; "": blocks are not written.
    """

    @dataclass
    class TokenRangeRetentionConfig(Typed):
        """Priority of the blocks of tokens [token_start, token_end), and its duration.

        If `token_end` is None, the range ends with the prompt.
        """

        token_start: int
        token_end: int | None
        priority: int = required(_PRIORITY)
        duration_ms: timedelta | None = None

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = within(35, _PRIORITY)
    decode_duration_ms: timedelta | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges = self.token_range_retention_configs
        ranges.sort(key=lambda each: each.token_start)
        if any(each.token_end is None for each in ranges[:-1]):
            raise InvalidValue("Invalid use of end indicator.")
        shown = f"got {[(each.token_start, each.token_end) for each in ranges]}"
        if any(each.token_start < 0 for each in ranges):
            raise InvalidValue(f"Token indices must be non-negative. {shown}")
        if any(each.token_end is not None and each.token_start >= each.token_end for each in ranges):
            raise InvalidValue(f"Range must have a positive, non-zero length. {shown}")
        for before, after in pairwise(ranges):
            if before.token_end is not None and before.token_end > after.token_start:
                raise InvalidValue(f"Token ranges must be non-overlapping. {shown}")


@also_called(max_new_tokens="max_tokens", type="request_type")
@dataclass(eq=False)
class Request(Typed):
    """A request. Its fields are mutable, except `input_token_ids` and `max_tokens`.

    Attributes:
        input_token_ids: Token ids of the prompt.
        max_tokens: Largest number of tokens to generate; called `max_new_tokens` before version 0.13.
        streaming: Whether to return tokens as they are generated, instead of all at the end.
        sampling_config: Sampling controls.
        output_config: Outputs to return.
        end_id: Token id that ends the output; None or -1: none.
        pad_id: Token id that pads ragged outputs of several beams.
        position_ids: Positions of the prompt's tokens.
        bad_words: Token sequences that are banned.
        stop_words: Token sequences that end the output.
        embedding_bias: [vocab_size], added to the logits.
        external_draft_tokens_config: Draft tokens for the first generated tokens.
        prompt_tuning_config: A prompt table.
        multimodal_input, multimodal_embedding, mrope_config: Multimodal inputs.
        lora_config: An adapter.
        lookahead_config, eagle_config: Sizes of drafting methods.
        kv_cache_retention_config: Retention of the request's KV blocks.
        logits_post_processor_name: Name of the executor's callable that changes the request's logits.
        logits_post_processor: A callable that changes the request's logits.
        encoder_input_token_ids, encoder_input_features, encoder_output_length: Input of an encoder.
        cross_attention_mask, skip_cross_attn_blocks: Inputs of cross attention.
        client_id: Number of the client.
        return_all_generated_tokens: Whether every streamed response has all tokens generated so far.
        priority: 0 to 1; waiting requests of higher priority start first.
        request_type: Phases that this engine computes; the constructor's keyword is `type`.
        context_phase_params: State from the server that computed the context.
        num_return_sequences: Deprecated: use the field of `sampling_config`.
        guided_decoding_params: The guide of the output.
        language_adapter_uid: A language adapter.
        allotted_time_ms: Time from arrival after which the request ends with TIMED_OUT.
        cache_salt_id: Salt: KV blocks are shared only among requests with equal salts.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"
    accepts_unknown: ClassVar[bool] = True
    read_only: ClassVar[frozenset[str]] = frozenset({"input_token_ids", "max_tokens"})

    input_token_ids: list[int]
    max_tokens: int = required(POSITIVE)
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    position_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: torch.Tensor | None = within(None, _VECTOR)
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_input: MultimodalInput | None = None
    multimodal_embedding: torch.Tensor | None = None
    mrope_config: MropeConfig | None = None
    lora_config: LoraConfig | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    logits_post_processor: Callable[..., Any] | None = None
    encoder_input_token_ids: list[int] | None = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = within(0.5, SHARE)
    request_type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    context_phase_params: ContextPhaseParams | None = None
    encoder_input_features: torch.Tensor | None = None
    encoder_output_length: int | None = None
    cross_attention_mask: torch.Tensor | None = None
    num_return_sequences: int = within(1, POSITIVE)
    eagle_config: EagleConfig | None = None
    skip_cross_attn_blocks: torch.Tensor | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: int | None = None
    allotted_time_ms: timedelta | None = None
    cache_salt_id: int | None = None

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise InvalidValue("Request.input_token_ids is empty: a request needs at least one prompt token")
        if self.num_return_sequences > 1:
            warnings.warn(
                "num_return_sequences of a Request is deprecated: set it in SamplingConfig",
                DeprecationWarning,
                stacklevel=4,
            )
            self.sampling_config.num_return_sequences = self.num_return_sequences
        if self.logits_post_processor_name is not None and self.logits_post_processor is not None:
            raise InvalidValue(
                "Only one of 'logitsPostProcessorName' and 'logitsPostProcessor' can be specified."
            )
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise InvalidValue("Guided decoding does not support with beam search.")
