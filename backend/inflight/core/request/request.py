"""The frozen Request and its parts, and the input of an iteration. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from inflight.additional_outputs import OfferedOutput, WantedOutput
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.block_store import StoreUpdate
from inflight.core.kv.picture_spans import Spans, find_spans
from inflight.core.kv.retention import RetentionConfig
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.core.request.engine_description import ModelLimits, kv_blocks
from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.sampling_config import (
    CONTROLS,
    SamplingConfig,
    check_token_ids,
)
from inflight.core.request.stop import StopSignal
from inflight.errors import InvalidArgument, Name, TooLong, Unsupported
from inflight.near_words import did_you_mean, listed


@dataclass(frozen=True, slots=True)
class FloatTensor:
    """A float32 tensor in the core: a shape, and bytes that the core passes on without reading them.

    Attributes:
        shape: Lengths of the dimensions.
        data: 4 * product of `shape` bytes, row-major, in the machine's byte order.
    """

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0 or len(self.data) != 4 * prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes for a float32 tensor of shape {list(self.shape)}")

    def __repr__(self) -> str:
        return f"FloatTensor(shape={self.shape})"


MAX_TOP_LOG_PROBS = 1024

BATCHED_POST_PROCESSOR_NAME = "batched"
"""TensorRT-LLM's name for the logits post-processor that gets the rows of all requests that name it in one
call."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """TensorRT-LLM's `OutputConfig`, with additional fields.

    All log probabilities are log_softmax, in float32, of the model's unchanged logits: before bias, penalties and
    temperature. `generation_logits` are the same unchanged logits.

    Attributes:
        exclude_input_from_output: Leave the prompt out of the output ids of a non-streaming request. Streamed
            responses never contain the prompt. Tensor `exclude_input_in_output`.
        return_log_probs: Return the log probability of each generated token, and the sum. Tensor
            `return_log_probs`.
        num_top_log_probs: Number of most likely tokens to return for each generated token, with their log
            probabilities. Tensor `num_top_log_probs`.
        return_prompt_log_probs: Return the log probability of each prompt token. Tensor `return_prompt_log_probs`.
        return_context_logits: Return the logits after each prompt token. Tensor `return_context_logits`.
        return_generation_logits: Return the logits from which each generated token was sampled. Tensor
            `return_generation_logits`.
        return_perf_metrics: Return times, and numbers of KV blocks and draft tokens. Tensor `return_perf_metrics`.
        return_receipt: Return the request's receipt. Tensor `return_receipt`.
        additional_outputs: Other tensors of the model to return. Tensor `additional_outputs`.
    """

    exclude_input_from_output: bool = False
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    return_prompt_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    return_receipt: bool = False
    additional_outputs: tuple[WantedOutput, ...] = ()

    @property
    def wants_details(self) -> bool:
        """Whether log probabilities or logits of generated tokens are returned."""
        return self.return_log_probs or self.num_top_log_probs > 0 or self.return_generation_logits

    @property
    def wants_context(self) -> bool:
        """Whether outputs of every prompt position are returned, so that no part of the prompt may be reused."""
        return self.return_context_logits or self.return_prompt_log_probs or bool(self.gathered_outputs)

    @property
    def gathered_outputs(self) -> tuple[WantedOutput, ...]:
        """The additional outputs that are also wanted for the prompt."""
        return tuple(output for output in self.additional_outputs if output.gather_context)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgument with the tensor, its value and the expected values if an option is not valid."""
        most = min(MAX_TOP_LOG_PROBS, vocab_size)
        if not 0 <= self.num_top_log_probs <= most:
            raise InvalidArgument(
                Name("num_top_log_probs"), f" must be in [0, {most}], got {self.num_top_log_probs}"
            )

    def validate_additional(self, offered: tuple[OfferedOutput, ...], uses_beams: bool) -> None:
        """Raise InvalidArgument for additional outputs that the engine does not offer."""
        names = [output.name for output in self.additional_outputs]
        if len(set(names)) < len(names):
            raise InvalidArgument(Name("additional_outputs"), f" has a name twice: {', '.join(names)}")
        by_name = {output.name: output for output in offered}
        for output in self.additional_outputs:
            if output.name not in by_name:
                known = ", ".join(by_name) or "none"
                raise InvalidArgument(
                    Name("additional_outputs"),
                    f": this engine has no output {output.name!r}; its parameter "
                    f"additional_model_outputs has {known}",
                )
            if output.gather_context and not by_name[output.name].gather_context:
                raise InvalidArgument(
                    Name("additional_outputs"),
                    f": {output.name} is not gathered for prompts; the parameter "
                    f"additional_model_outputs would have to say {output.name}:context",
                )
        if names and uses_beams:
            raise InvalidArgument(
                Name("additional_outputs"),
                " needs ",
                Name("beam_width"),
                " 1, because a beam search reorders its rows",
            )


@dataclass(frozen=True, slots=True)
class ExternalDraft:
    """TensorRT-LLM's `ExternalDraftTokensConfig`: a guess at the first generated tokens, verified in one pass.

    Attributes:
        token_ids: The guessed tokens. Tensor `draft_input_ids` [1, n].
        logits: [n, vocab_size] float32; token i was sampled from the softmax of row i. With logits, a token is
            accepted with probability min(1, target / draft), which keeps the target's distribution. Without
            logits, tokens are accepted as long as they equal the tokens that would be generated without a
            draft. Tensor `draft_logits`.
        acceptance_threshold: With logits, accept a token if target / draft >= threshold instead of by chance.
            Tensor `draft_acceptance_threshold`.
        ends_sequence: Whether the sequence ends with LENGTH once the draft is verified, after the accepted tokens
            and one more, so that the caller can draft the next tokens.
    """

    token_ids: tuple[int, ...]
    logits: FloatTensor | None = None
    acceptance_threshold: float | None = None
    ends_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request, for log lines and traces.

    Attributes:
        front: The front end: "openai", "triton", "executor" or "dynamo".
        request_id: The client's id of the request, or one that the front end made; "": none.
        model: The model that the client named; "": none.
        client: The client, as far as it is known: its address, or its `client_id`.
        received_ns: When the front end received the request, in monotonic nanoseconds; 0: when the engine did.
        operation: OpenTelemetry's name of the operation: `chat` or `text_completion`.
        traceparent: W3C's trace context of the client; "": none.
    """

    front: str
    request_id: str = ""
    model: str = ""
    client: str = ""
    received_ns: int = 0
    operation: str = "text_completion"
    traceparent: str = ""

    @property
    def log_extra(self) -> dict[str, str]:
        """The argument `extra` of log lines about this request."""
        return {"request_id": self.request_id}


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as a front end submits it. Specification: Inference Request.

    Attributes:
        request_id: Unique among requests in flight, 0 .. 2**64 - 1.
        input_token_ids: The prompt. Tensor `input_ids` [1, num_input_tokens].
        max_new_tokens: Maximum number of tokens to generate, at least 1. Tensor `request_output_len` [1, 1].
        streaming: Respond at every iteration instead of once. Tensor `streaming`.
        end_ids: Token ids that end the sequence; they are not returned. Tensor `end_id`.
        pad_id: The id that pads the shorter outputs of several beams; None means -1. Tensor `pad_id`.
        sampling: The sampling controls.
        output: The outputs to return.
        stop_words: Token sequences that end the output once generated; they are returned. A stop word must lie
            wholly within the generated tokens. Tensor `stop_words_list`.
        stop_words_after: A stop word that is complete within this many generated tokens is ignored.
        bad_words: Token sequences that must not appear: a sequence's last token is banned wherever its
            other tokens come before, prompt included. Tensor `bad_words_list`.
        embedding_bias: [vocab_size], added to the logits. Tensor `embedding_bias`.
        draft: Draft of the first generated tokens. Tensors `draft_*`.
        prompt_lookup_num_tokens: Maximum number of draft tokens per iteration from the server's drafter, prompt
            lookup by default; 0: as the server is set, none by default. Tensor `prompt_lookup_num_tokens`.
        logits_post_processor_name: Name of the operator's function that changes the logits before all controls;
            "": none. Tensor `logits_post_processor_name`.
        identity: The properties other than tokens on which the request's KV blocks depend.
        retention: How long the request's KV blocks are worth keeping after it has ended.
        priority: 0 .. 1; waiting requests of a higher priority go first. Tensor `priority`.
        client_id: The client that sent the request; clients of one priority get equal shares. Tensor `client_id`.
        allotted_time_ms: Milliseconds from arrival after which the request ends with TIMED_OUT; 0: no deadline.
            Tensor `allotted_time_ms`.
        arrival_time_ns: When the engine client got the request, by the clock of `IterationInput.now_ns`; 0:
            unknown.
        guide: The format that the generated text must have; None: any format. Tensors `guided_decoding_*`.
        lora: The LoRA adapter to use; None: the base model. Tensors `lora_*`.
        prompt_table: Embeddings for prompt ids >= vocab_size; None: there are no such ids. Tensor
            `prompt_embedding_table`.
        rotary_table: Rotary positions of the prompt; None: each token's index. Tensors `mrope_*`.
        is_continuation: Whether the request continues one that this engine has answered; such a request is
            accepted during a drain and with a full queue.
        may_be_continued: Whether a continuation may follow if the request ends with LENGTH; a drain waits a moment
            for the continuation.
        origin: The request's origin, for log lines; None: it gets no access line.
    """

    request_id: int
    input_token_ids: tuple[int, ...]
    max_new_tokens: int
    streaming: bool = False
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputOptions = field(default_factory=OutputOptions)
    stop_words: tuple[tuple[int, ...], ...] = ()
    stop_words_after: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: FloatTensor | None = None
    draft: ExternalDraft | None = None
    prompt_lookup_num_tokens: int = 0
    logits_post_processor_name: str = ""
    identity: PrefixIdentity = field(default_factory=PrefixIdentity)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    priority: float = 0.5
    client_id: int = 0
    allotted_time_ms: int = 0
    arrival_time_ns: int = 0
    guide: Guide | None = None
    lora: LoraRequest | None = None
    prompt_table: PromptTable | None = None
    rotary_table: RotaryTable | None = None
    is_continuation: bool = False
    may_be_continued: bool = False
    origin: Origin | None = field(default=None, compare=False)

    @property
    def log_extra(self) -> dict[str, str] | None:
        """The argument `extra` of log lines about this request."""
        return None if self.origin is None else self.origin.log_extra

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the prompt, rows of a prompt table included."""
        return len(self.input_token_ids)

    @property
    def max_sequence_length(self) -> int:
        """Number of prompt and generated tokens at the length limit."""
        return len(self.input_token_ids) + self.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Number of KV entries of one sequence at the length limit. The last generated token is never an input."""
        return len(self.input_token_ids) + self.max_new_tokens - 1

    @property
    def draft_length(self) -> int:
        """Number of draft tokens in the request's own draft."""
        return len(self.draft.token_ids) if self.draft else 0

    @property
    def looks_back(self) -> bool:
        """Whether the device needs all previous tokens to sample the next one."""
        return (
            self.sampling.looks_back
            or bool(self.logits_post_processor_name)
            or any(len(word) > 1 for word in self.bad_words)
        )

    @property
    def starts_with_tokens(self) -> bool:
        """Whether the device gets all tokens so far when the sequence starts or resumes in a slot."""
        return self.looks_back or self.guide is not None

    @property
    def needs_host(self) -> bool:
        """Whether the host must see each token before the next one is sampled; otherwise the device continues
        alone.

        The host verifies drafts, computes token details, calls logits post-processors and follows guides; see also
        `SamplingConfig.needs_host`.
        """
        return (
            self.sampling.needs_host
            or self.looks_back
            or self.draft is not None
            or self.prompt_lookup_num_tokens > 0
            or self.output.wants_details
            or bool(self.output.additional_outputs)
            or self.guide is not None
        )

    @property
    def banning_tensors(self) -> list[str]:
        """Names of the tensors that may ban every possible next token."""
        banning = {
            "logits_post_processor_name": bool(self.logits_post_processor_name),
            "embedding_bias": self.embedding_bias is not None,
            # Only if the control is used and there are end ids, which it bans.
            "min_length": bool(self.end_ids),
            "bad_words_list": bool(self.bad_words),
            "guided_decoding_guide": self.guide is not None,
        }
        for name, control in CONTROLS.items():
            if control.bans:
                banning[control.tensor] = banning.get(control.tensor, True) and self.sampling.uses(name)
        return [name for name, bans in banning.items() if bans]

    def without_weights(self) -> Request:
        """Return this request without its adapter's weights."""
        if self.lora is None or self.lora.weights is None:
            return self
        return replace(self, lora=replace(self.lora, weights=None))

    def max_kv_blocks(self, tokens_per_block: int) -> int:
        """Return the KV blocks needed at the length limit."""
        return kv_blocks(self.prompt_length, self.max_new_tokens, self.sampling.beam_width, tokens_per_block)

    def spans(self, limits: ModelLimits) -> Spans:
        """Return the prompt's picture spans; empty for a model with causal attention."""
        if self.prompt_table is None or not limits.max_span_length:
            return ()
        return find_spans(self.input_token_ids, limits.vocab_size)

    def validate(self, limits: ModelLimits) -> None:
        """Raise InvalidArgument, with a possible value in the message, if this request can never run on such a
        model."""
        self.sampling.validate(limits.vocab_size)
        self.output.validate(limits.vocab_size)
        self.output.validate_additional(limits.additional_outputs, self.sampling.uses_beams)
        if not self.input_token_ids:
            raise InvalidArgument(Name("input_ids"), " is empty: a request needs at least one prompt token")
        if self.max_new_tokens < 1:
            raise InvalidArgument(
                Name("request_output_len"), f" must be at least 1, got {self.max_new_tokens}"
            )
        self.identity.validate(self.prompt_length)
        self.retention.validate()
        limits.check_sequences(1, self.sampling.num_sequences, "num_return_sequences")
        self._validate_queueing()
        self._validate_prompt_ids(limits)
        if self.rotary_table is not None:
            self.rotary_table.validate(
                limits.rotary_dim, self.prompt_length, self.max_new_tokens, limits.max_sequence_length
            )
        self._validate_ids(limits.vocab_size)
        self._validate_lengths(limits)
        self._validate_beams(limits)
        self._validate_drafts(limits)
        self._validate_post_processor(limits.logits_post_processors)
        if self.guide is not None:
            self.guide.validate()
        if self.lora is not None:
            self.lora.validate(limits.max_adapter_rank)

    def _validate_queueing(self) -> None:
        if not 0.0 <= self.priority <= 1.0:
            raise InvalidArgument(Name("priority"), f" must be in [0, 1], got {self.priority}")
        if not 0 <= self.client_id < 1 << 64:
            raise InvalidArgument(Name("client_id"), f" must be in [0, 2**64), got {self.client_id}")
        if self.allotted_time_ms < 0:
            raise InvalidArgument(
                Name("allotted_time_ms"), f" must be >= 0 (0: no deadline), got {self.allotted_time_ms}"
            )

    def _validate_prompt_ids(self, limits: ModelLimits) -> None:
        """Check prompt ids; ids >= vocab_size are virtual and stand for rows of the prompt table."""
        vocab_size, highest = limits.vocab_size, max(self.input_token_ids)
        table = self.prompt_table
        if table is None:
            try:
                check_token_ids("input_ids", self.input_token_ids, vocab_size)
            except InvalidArgument as error:
                if highest < vocab_size:
                    raise
                raise InvalidArgument(
                    *error.args,
                    "; ids from there on stand for rows of ",
                    Name("prompt_embedding_table"),
                    ", which is missing",
                ) from None
            return
        if limits.max_span_length and not limits.hidden_size:
            raise Unsupported(
                Name("prompt_embedding_table"),
                " is not available: the tokens of this model's pictures attend to each other in both directions, "
                "which the engine torch computes, but not this one",
            )
        table.validate(limits.hidden_size, limits.num_added_layers)
        if table.num_rows > limits.max_sequence_length:
            raise InvalidArgument(
                Name("prompt_embedding_table"),
                f" has {table.num_rows} rows, more than the {limits.max_sequence_length} tokens that a sequence "
                "can have: send those that the prompt names",
            )
        check_token_ids("input_ids", self.input_token_ids, vocab_size + table.num_rows)
        if highest >= vocab_size and self.output.return_prompt_log_probs:
            raise InvalidArgument(
                Name("return_prompt_log_probs"),
                " is true, but rows of ",
                Name("prompt_embedding_table"),
                ", which ",
                Name("input_ids"),
                " has, are not tokens of the vocabulary and have no probability: leave one of the two out",
            )
        self._validate_spans(limits)

    def _validate_spans(self, limits: ModelLimits) -> None:
        """Check that one iteration can hold each picture, and the last one together with the draft that may
        follow it."""
        longest = max((end - begin for begin, end in self.spans(limits)), default=0)
        if longest and longest + self.draft_length > limits.max_span_length:
            beside = f" and a draft of {self.draft_length}" if self.draft_length else ""
            raise TooLong(
                Name("input_ids"),
                f" has a picture of {longest} tokens{beside}, which have to be computed in one iteration, as they "
                f"attend to each other in both directions; this server computes at most {limits.max_span_length} "
                "together: raise max_num_tokens",
            )

    def _validate_ids(self, vocab_size: int) -> None:
        for end_id in self.end_ids:
            if not 0 <= end_id < vocab_size:
                raise InvalidArgument(
                    Name("end_id"),
                    f" must be a token id in [0, {vocab_size - 1}], got {end_id}",
                )
        for name, words in (("stop_words_list", self.stop_words), ("bad_words_list", self.bad_words)):
            for word in words:
                if not word:
                    raise InvalidArgument(Name(name), " has an empty word")
                check_token_ids(name, word, vocab_size)
        bias = self.embedding_bias
        if bias is not None and bias.shape != (vocab_size,):
            raise InvalidArgument(
                Name("embedding_bias"), f" must have shape [1, {vocab_size}], got {[1, *bias.shape]}"
            )

    def _validate_lengths(self, limits: ModelLimits) -> None:
        if self.prompt_length > limits.max_input_length:
            raise TooLong(
                Name("input_ids"),
                f" has {self.prompt_length} tokens; this server takes prompts of at most "
                f"{limits.max_input_length} tokens{self._remedy(limits)}",
            )
        if limits.fits(self.prompt_length, self.max_new_tokens, self.sampling.beam_width):
            return
        room = limits.room(self.prompt_length, self.sampling.beam_width)
        if self.prompt_length + room < limits.max_sequence_length:
            raise self._too_many_blocks(room, limits)
        raise TooLong(
            Name("request_output_len"),
            f" is {self.max_new_tokens}, but after {self.prompt_length} prompt tokens at most {room} "
            f"fit in the model's sequence length of {limits.max_sequence_length}",
        )

    def _remedy(self, limits: ModelLimits) -> str:
        """Return the end of the error message for a prompt that fits the model but not one iteration."""
        if not limits.max_context_tokens < self.prompt_length < limits.max_sequence_length:
            return ""
        return (
            f", as one iteration has to hold all of it (max_num_tokens is {limits.max_context_tokens}); "
            "with the parameter enable_chunked_context it would be split over several"
        )

    def _too_many_blocks(self, room: int, limits: ModelLimits) -> TooLong:
        """Return the error for a request that the KV cache has no room for."""
        size, beams = limits.tokens_per_block, self.sampling.beam_width
        needed = self.max_kv_blocks(size)
        beam_clause = (" and ", Name("beam_width"), f" {beams}") if beams > 1 else ()
        return TooLong(
            f"{self.prompt_length} prompt tokens, ",
            Name("request_output_len"),
            f" {self.max_new_tokens}",
            *beam_clause,
            f" need {needed * size} tokens of KV cache; it holds {limits.num_blocks * size}, so ",
            Name("request_output_len"),
            f" can be at most {room}",
        )

    def _validate_beams(self, limits: ModelLimits) -> None:
        width = self.sampling.beam_width
        if width > limits.max_beam_width:
            raise InvalidArgument(
                Name("beam_width"), f" must be at most {limits.max_beam_width} on this server, got {width}"
            )
        candidates = width * max(2, 1 + len(self.end_ids))
        if self.sampling.uses_beams and candidates > limits.vocab_size:
            raise InvalidArgument(
                Name("beam_width"),
                f" {width} needs {candidates} candidates, the vocabulary has {limits.vocab_size}",
            )

    def _validate_drafts(self, limits: ModelLimits) -> None:
        lookup, width = self.prompt_lookup_num_tokens, self.sampling.beam_width
        if lookup < 0:
            raise InvalidArgument(Name("prompt_lookup_num_tokens"), f" must be >= 0 (0: off), got {lookup}")
        if width > 1 and (lookup or self.draft):
            name = "draft_input_ids" if self.draft else "prompt_lookup_num_tokens"
            raise InvalidArgument(Name(name), " needs ", Name("beam_width"), f" 1, got {width}")
        if self.draft:
            self._validate_external_draft(self.draft, limits)

    def _validate_post_processor(self, known: tuple[str, ...]) -> None:
        name = self.logits_post_processor_name
        if not name or name in known:
            return
        expected = f"expected one of {listed(map(repr, known))}" if known else "this server has none"
        if name == BATCHED_POST_PROCESSOR_NAME:
            problem = "Batched logits post processor is not defined"
        else:
            problem = f"LogitsPostProcessor {name[:100]} not found"
        raise InvalidArgument(
            f"{problem}: ",
            Name("logits_post_processor_name"),
            f" is {name[:100]!r}, {expected}{did_you_mean(name, known)}",
        )

    def _validate_external_draft(self, draft: ExternalDraft, limits: ModelLimits) -> None:
        length, threshold = len(draft.token_ids), draft.acceptance_threshold
        if not length:
            raise InvalidArgument(
                Name("draft_input_ids"), " is empty: leave it out, or send at least one token"
            )
        check_token_ids("draft_input_ids", draft.token_ids, limits.vocab_size)
        most = limits.draft_room(self.prompt_length)
        if length > most:
            raise InvalidArgument(
                f"Draft tokens length ({length}) exceeds maximum draft tokens length ({max(most, 0)}): ",
                Name("draft_input_ids"),
                " is too long",
            )
        if length >= self.max_new_tokens:
            raise InvalidArgument(
                Name("draft_input_ids"),
                f" has {length} tokens, which ",
                Name("request_output_len"),
                f" {self.max_new_tokens} has no room for: send at most {self.max_new_tokens - 1}",
            )
        wanted = (length, limits.vocab_size)
        if draft.logits is not None and draft.logits.shape != wanted:
            raise InvalidArgument(
                Name("draft_logits"),
                f" must have shape {[1, *wanted]}: one row for each of ",
                Name("draft_input_ids"),
                f"; got {[1, *draft.logits.shape]}",
            )
        if threshold is not None and not 0.0 <= threshold < float("inf"):
            raise InvalidArgument(
                Name("draft_acceptance_threshold"), f" must be a finite number >= 0, got {threshold}"
            )


@dataclass(frozen=True, slots=True)
class IterationInput:
    """All input of one iteration that does not follow from earlier state.

    Rank 0 makes it inside GetInferenceRequests. It is broadcast to the other ranks and recorded in traces.
    `now_ns` is the only clock that the core sees.

    Attributes:
        iteration: Number of the iteration, from 0.
        now_ns: Monotonic time of this iteration, in nanoseconds.
        new_requests: Requests that arrive with this iteration, in order.
        stops: Requests to end early.
        guides: Requests whose guides are ready or have failed.
        adapters: Changes of the stored adapters, and requests whose adapters are ready or have failed.
        blocks: Changes of the block store, and loads of blocks that have ended.
    """

    iteration: int
    now_ns: int
    new_requests: tuple[Request, ...] = ()
    stops: tuple[StopSignal, ...] = ()
    guides: tuple[GuideEvent, ...] = ()
    adapters: AdapterUpdate = field(default_factory=AdapterUpdate)
    blocks: StoreUpdate = field(default_factory=StoreUpdate)
