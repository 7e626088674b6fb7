"""Bodies of requests: OpenAI's fields and vLLM's additional fields, each with type and default.

Numeric sampling controls are in `control_fields`, which is generated from their declarations. A null field
counts as absent. The error for an unknown field names it; the error for a known field that is not supported
gives the reason. `sampling` converts fields for the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inflight.near_words import nearest
from inflight.openai.control_fields import BodyControls
from inflight.openai.errors import ApiError, refused, unsupported
from inflight.same_meaning import same_meaning

MAX_INT32 = (1 << 31) - 1
"""Largest count or token id, because the engine's integers have 32 bits."""

MAX_TOKEN_IDS = 1 << 15
"""Largest number of token ids in a body's biases or end ids."""
MAX_ID_LENGTH = 256
"""Largest number of characters of a request's id, which every chunk of its answer repeats."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""A client's own texts about an object that is kept, within OpenAI's bounds: 16 pairs of 64 and 512 characters."""
_MAX_VARIABLES = 64  # largest number of chat_template_kwargs

# Validation of a list ends at its first invalid item. Otherwise pydantic would make an error for every item
# of a long list.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Body(BaseModel):
    """Base class of bodies and of objects in bodies. Types are strict: a number in quotes is an error.

    Attributes:
        not_served: Known fields that are not supported: for each, the values without effect and the reason
            for refusing others.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in cast(dict[str, Any], data).items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in [name for name in given if name not in known]:
            if name not in cls.not_served:
                raise refused(_unknown(name, [*known, *cls.not_served]), is_of_field=True)
            neutral, sentence = cls.not_served[name]
            if given.pop(name) not in neutral:
                raise refused(unsupported(name, f"{name}: {sentence}"), is_of_field=True)
        return given


_PROMPT = "/v1/completions takes a prompt, and a chat has messages"
_PICTURES = "/v1/chat/completions takes pictures in messages"
_USAGE = "usage in the answer has this number"
_OF_OTHER_ROUTES = {
    "messages": "/v1/chat/completions takes messages",
    "prompt": _PROMPT,
    "text_input": _PROMPT,
    "input_ids": "/v1/completions takes token ids as prompt, and a chat has messages",
    "input": "/v1/responses and /v1/embeddings take input; /v1/completions takes a prompt, and "
    "/v1/chat/completions messages",
    **dict.fromkeys(("image_url", "image_url_input", "image_input", "image_bytes_input"), _PICTURES),
    **dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), _USAGE),
    "exclude_input_in_output": "answers have no prompt unless echo is true",
}
"""Advice in an error about an unknown field, by the field."""

_BY_OTHER_FIELDS = {
    **dict.fromkeys(
        ("lora_name", "lora_task_id", "lora_id", "lora_path"),
        ("model", "send the adapter's name in model"),
    ),
    **dict.fromkeys(
        ("beam_width", "num_beams"),
        ("use_beam_search", "send use_beam_search true, and the number of beams in n"),
    ),
}
"""The field that a body has in place of a tensor of Triton's models, and how to use it, by the tensor."""


def _unknown(name: str, known: list[str]) -> ApiError:
    name = name[:100]
    field, way = _BY_OTHER_FIELDS.get(name, ("", ""))
    if field in known:
        hint = way
    elif near := same_meaning(name, known):
        hint = f"did you mean {near}?"
    else:
        near = nearest(name, known)
        hint = _OF_OTHER_ROUTES.get(name) or (f"did you mean {near}?" if near else "leave it out")
    return ApiError(f"unknown field {name}: it would be ignored; {hint}", 400, name, "unknown_parameter")


class StreamOptions(Body):
    """Options of a stream: which chunks report the usage.

    Attributes:
        include_usage: Whether the stream ends with a chunk that has the usage.
        continuous_usage_stats: Whether every chunk has the usage so far.
    """

    not_served = {
        "include_obfuscation": ((False,), "chunks are sent without padding here; leave it out or send false")
    }
    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            text = "stream_options.continuous_usage_stats is only for include_usage: true"
            raise refused(ApiError(text, 400, "stream_options", "invalid_value"))
        return self


_OF_OTHER_LIBRARIES: dict[str, tuple[tuple[Any, ...], str]] = dict.fromkeys(
    ("disable_fallback", "disable_additional_properties"),
    ((False, ""), "guides have no such switch here"),
)


class StructuredOutputs(Body):
    """vLLM's object for guided decoding; it must have exactly one kind of guide.

    Attributes:
        whitespace_pattern: Allowed white space between the tokens of JSON, as a regular expression.
        disable_any_whitespace: Whether to forbid white space between the tokens of JSON.
    """

    not_served = _OF_OTHER_LIBRARIES
    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False


_COMMON_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "include_stop_str_in_output": ((False,), "texts end before their stop string; add it where it is needed"),
    "spaces_between_special_tokens": ((True,), "special tokens are decoded with the text around them"),
    "logits_processors": (
        ([],),
        "functions are installed on the server; name one in logits_post_processor_name",
    ),
    "kv_transfer_params": ((), "prefill and decode run in one engine here"),
    "detokenize": ((True,), "answers are text; return_token_ids adds the ids"),
    "service_tier": (("auto", "default"), "there is one tier"),
}


class SamplingFields(Body, BodyControls):
    """Fields that say how each answer to a prompt is sampled, where it ends, and which log probs it has."""

    n: int = Field(1, ge=1, le=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: Texts = Field(default_factory=list)
    logits_post_processor_name: str = ""
    prompt_lookup_num_tokens: int = Field(0, ge=0, le=MAX_INT32)

    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    stop: str | Texts = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list[int], max_length=MAX_TOKEN_IDS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_INT32)
    structured_outputs: StructuredOutputs | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_biases(cls, biases: Any) -> Any:
        """Raise an error for the first invalid value only; pydantic would make an error for each."""
        if not isinstance(biases, dict):
            return biases
        given = cast(dict[str, Any], biases)
        if len(given) > MAX_TOKEN_IDS:
            text = f"logit_bias has {len(given)} tokens; this server takes at most {MAX_TOKEN_IDS}"
            raise refused(ApiError(text, 400, "logit_bias", "invalid_value"))
        for name, bias in given.items():
            if not isinstance(bias, int | float) or isinstance(bias, bool):
                shown = f"{name[:20]!r}: {repr(bias)[:80]}"
                raise refused(
                    ApiError(f"logit_bias must be numbers, got {shown}", 400, "logit_bias", "invalid_value")
                )
        return given


class SamplingBody(SamplingFields):
    """Fields of both routes: sampling, stop conditions and outputs."""

    model: str | None = None
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = Field(None, max_length=MAX_ID_LENGTH)
    store: bool | None = None
    metadata: dict[str, str] | None = None

    use_beam_search: bool = False
    early_stopping: bool | Literal["never"] = False

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT32)
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    return_receipt: bool = False
    priority: int = 0
    cache_salt: str | None = Field(None, min_length=1)

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, without empty strings."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))

    @property
    def includes_usage(self) -> bool:
        """Return whether the answer reports its usage. A stream reports it only on request."""
        return not self.stream or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Return whether every chunk of the stream reports the usage."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @model_validator(mode="after")
    def _check_together(self) -> SamplingBody:
        if self.best_of not in (None, self.n):
            raise refused(
                unsupported(
                    "best_of",
                    f"best_of is {self.best_of}: every sequence that is generated here is returned; send n alone",
                )
            )
        if self.stream_options is not None and not self.stream:
            raise refused(
                ApiError("stream_options is only for stream: true", 400, "stream_options", "invalid_value")
            )
        if self.prompt_logprobs is not None and self.stream:
            raise refused(
                unsupported(
                    "prompt_logprobs", "prompt_logprobs are not available in a stream: leave stream out"
                )
            )
        return self


class CompletionBody(SamplingBody):
    """The JSON body of a request to /v1/completions."""

    not_served = {
        **_COMMON_NOT_SERVED,
        "suffix": (
            ("",),
            "text is only continued, not inserted; send the prompt with the model's own markers",
        ),
        "prompt_embeds": ((), "prompts are texts or token ids here; Triton's endpoint takes embeddings"),
    }
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_INT32)
    add_special_tokens: bool = True


class ChatBody(SamplingBody):
    """The JSON body of a request to /v1/chat/completions."""

    not_served = {
        **_COMMON_NOT_SERVED,
        "functions": (([],), "OpenAI has replaced it: send tools"),
        "function_call": (("none",), "OpenAI has replaced it: send tool_choice"),
        "audio": ((), "this server generates text alone"),
        "modalities": ((["text"],), "this server generates text alone"),
        "prediction": ((), "send prompt_lookup_num_tokens to draft tokens from the prompt"),
        "web_search_options": ((), "this server searches nothing; send tools, and search yourself"),
        "echo": ((False,), "messages are not repeated; continue_final_message continues the last one"),
        "chat_template": ((), "the template is the server's: start it with --chat-template FILE"),
        "documents": (([],), "put them into a message, or into chat_template_kwargs"),
    }
    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_INT32)
    tools: Objects = Field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=_MAX_VARIABLES)
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)


class PoolingBody(Body):
    """Fields of the routes whose answer is computed from the last position of each prompt.

    Attributes:
        truncate_prompt_tokens: Largest number of tokens of a prompt, those that the tokenizer adds included; the
            end of a longer text is left out. -1: as many as fit. None: a prompt that does not fit is an error.
    """

    model: str | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str | None = Field(None, min_length=1)
    request_id: str | None = Field(None, max_length=MAX_ID_LENGTH)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT32)


class EmbeddingBody(PoolingBody):
    """The JSON body of a request to /v1/embeddings.

    Attributes:
        dimensions: Number of values of an embedding: the first ones of the model's, normalized again.
    """

    not_served = {
        "messages": ((), "texts are embedded as they are: send input, with the model's own instruction")
    }
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)
    add_special_tokens: bool = True


class ClassifyBody(PoolingBody):
    """The JSON body of a request to /v1/classify: texts, or the messages of one chat.

    Attributes:
        use_activation: Whether the numbers are probabilities; otherwise they are the products with the head.
    """

    not_served = {
        "activation": ((True,), "vLLM has renamed it: send use_activation"),
        "softmax": ((True,), "vLLM has renamed it: send use_activation"),
        "chat_template": ((), "the template is the server's: start it with --chat-template FILE"),
    }
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    messages: Objects | None = Field(None, min_length=1)
    use_activation: bool = True
    add_special_tokens: bool | None = None
    tools: Objects = Field(default_factory=list[dict[str, Any]])
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=_MAX_VARIABLES)


class DocumentText(Body):
    """A document as an object."""

    text: str


class RerankBody(PoolingBody):
    """The JSON body of a request to /v1/rerank, as of Jina, Cohere and vLLM.

    Attributes:
        top_n: Number of documents to return, the best ones; None and 0: all.
        instruction: Task that the prompt states; None: the one that the model's authors use for web search.
    """

    not_served = {
        "max_tokens_per_doc": ((), "send truncate_prompt_tokens, which counts a whole prompt's tokens")
    }
    query: str
    documents: list[str | DocumentText] = Field(min_length=1)
    top_n: int | None = Field(None, ge=0, le=MAX_INT32)
    return_documents: bool = True
    instruction: str | None = None


class ScoreBody(PoolingBody):
    """The JSON body of a request to /v1/score: one text and several, or as many texts as others.

    Attributes:
        instruction: As in `RerankBody`.
    """

    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None


class BatchBody(Body):
    """The JSON body of a request to /v1/batches."""

    not_served = {"output_expires_after": ((), "files are kept until they are deleted")}
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class TokenizeBody(Body):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects = Field(default_factory=list[dict[str, Any]])
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=_MAX_VARIABLES)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The JSON body of POST /detokenize: token ids to turn into text."""

    model: str | None = None
    tokens: TokenIds
