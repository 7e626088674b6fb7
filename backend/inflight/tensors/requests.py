"""Convert a client's inputs to Requests and the options of their replies.

Reads the tensors of prompts and of end conditions; other modules of this package read other tensors.
`Request.validate` checks ranges. Errors are raised before the request is submitted to the engine. Any
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.prompt_table import TABLE_TENSORS, PromptTable, RotaryTable
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.prompt import Prompt, ReplyOptions, engine_streams
from inflight.tensors.kv_cache import read_identity, read_retention
from inflight.tensors.lora import read_lora
from inflight.tensors.pictures import BlockingEncoder, has_pictures, read_pictures
from inflight.tensors.prompt_tables import (
    read_extra_ids,
    read_picture_ids,
    read_prompt_table,
    read_rotary_table,
)
from inflight.tensors.reader import TensorReader, each_row
from inflight.tensors.request_parameters import NO_PARAMETERS, RequestParameters
from inflight.tensors.sampling import read_bias, read_draft, read_drafting, read_guide, read_sampling_config
from inflight.tensors.wanted_outputs import Naming, output_config, wanted_outputs
from inflight.tensors.word_lists import Words, read_words
from inflight.text import text_encoder
from inflight.text.text_encoder import TextEncoder

NO_ID = -1
"""The token id that means no token."""

_DEFAULT_PRIORITY = 0.5

_TEXT_LISTS = ("stop_words", "bad_words", "embedding_bias_words")

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class ServingContext:
    """Everything except the tensors that the conversion of a request depends on.

    Attributes:
        description: The engine behind this model.
        decoupled: Whether a request may have more than one response.
        exclude_input_in_output: Whether outputs leave out the prompt by default.
        naming: The outputs that the client named.
        encoder: Encoder of the request's texts.
        parameters: The request's parameters.
        has_draft_model: Whether another model can draft tokens.
        skip_special_tokens: Whether special tokens are left out of texts.
        pictures: Encoder of the request's pictures; None if there is none.
    """

    description: EngineDescription
    decoupled: bool
    exclude_input_in_output: bool
    naming: Naming
    encoder: TextEncoder
    parameters: RequestParameters = NO_PARAMETERS
    has_draft_model: bool = False
    skip_special_tokens: bool = True
    pictures: BlockingEncoder | None = None


def client_id(rows: Sequence[TensorReader], parameters: RequestParameters) -> int:
    """Return the client id of a request: the first prompt's tensor, else the parameter; 0 if neither is given."""
    return _first(rows[0].integer("client_id"), parameters.client_id, 0)


def check_texts(rows: Sequence[TensorReader], encoder: TextEncoder, limits: ModelLimits) -> None:
    """Raise an error if a text is too long for this model, before any other use of the texts.

    Raises:
        InvalidArgument: text_input has more bytes than the tokens of the longest prompt can represent, or there
            are too many words or too long ones; the message names tensor, length and limit.
        Unsupported: A long text was sent, and there is no tokenizer.
    """
    for num_bytes in _text_sizes(rows, "text_input"):
        encoder.check_prompt_length(num_bytes, "text_input", limits)
    for name in _TEXT_LISTS:
        for row in rows:
            text_encoder.check_words(row.text_sizes(name), row.shown_name(name))


def tokenizing_cost(rows: Sequence[TensorReader]) -> int:
    """Return the cost of tokenizing all texts of a request, as the size in bytes of one prompt of equal cost."""
    words = [size for name in _TEXT_LISTS for size in _text_sizes(rows, name)]
    return text_encoder.tokenizing_cost(_text_sizes(rows, "text_input"), words)


def must_encode_pictures(rows: Sequence[TensorReader]) -> bool:
    """Return whether a prompt of the request has pictures, so that its conversion may take seconds."""
    return any(map(has_pictures, rows))


def _text_sizes(rows: Sequence[TensorReader], name: str) -> list[int]:
    return [size for row in rows for size in row.text_sizes(name)]


def convert(readers: Sequence[TensorReader], context: ServingContext) -> tuple[Prompt, ...]:
    """Convert one client's request to prompts, one for each row of its batch.

    Raises InvalidArgument or Unsupported; the message has the client's name of the tensor, the value, the
    expected values, and the row if there are several. The returned requests are valid for the engine that
    `context` describes.
    """
    rows = [_PromptReader(row, context, is_in_batch=len(readers) > 1) for row in readers]
    texts = each_row([row.prompt_text for row in rows])
    pictures = each_row([partial(row.encode_pictures, text) for row, text in zip(rows, texts)])
    to_encode = [text for text, made in zip(texts, pictures) if text is not None and made is None]
    encoded = iter(context.encoder.prompts(to_encode) if to_encode else ())
    contents = [made or (None if text is None else next(encoded)) for text, made in zip(texts, pictures)]
    prompts = tuple(each_row([partial(row.prompt, *pair) for row, *pair in zip(rows, texts, contents)]))
    num_sequences = sum(prompt.request.sampling.num_sequences for prompt in prompts)
    name = readers[0].shown_name("num_return_sequences")
    context.description.limits.check_sequences(len(prompts), num_sequences, name)
    return prompts


class _PromptReader:
    """Converts the tensors of one prompt to a Prompt."""

    def __init__(self, reader: TensorReader, context: ServingContext, is_in_batch: bool) -> None:
        self._reader = reader
        self._context = context
        self._is_in_batch = is_in_batch
        self._picture_name = ""  # the client's name of the tensor with the pictures

    def prompt_text(self) -> str | None:
        """Return the prompt's text; None if the client sent ids."""
        reader = self._reader
        reader.refuse_unbuilt()
        text = reader.text("text_input")
        if text is None:
            return None
        if reader.array("input_ids") is not None:
            raise InvalidArgument(
                "got both ",
                Name("input_ids"),
                " and ",
                Name("text_input"),
                ": send the prompt in one of them",
            )
        length = reader.integer("input_lengths")
        if length is not None:
            raise InvalidArgument(
                Name("input_lengths"),
                f" is {length}, but it counts ",
                Name("input_ids"),
                " and ",
                Name("text_input"),
                " came instead",
            )
        return text

    def encode_pictures(self, text: str | None) -> EncodedPrompt | None:
        """Return the prompt with its pictures encoded; None if it has no pictures. May take seconds."""
        reader, context = self._reader, self._context
        if (sent := read_pictures(reader)) is None:
            return None
        if text is None:
            raise InvalidArgument(
                sent.name, " needs ", Name(reader.shown_name("text_input")), ", which is missing"
            )
        others = [
            name for name in (*TABLE_TENSORS, "prompt_table_extra_ids") if reader.array(name) is not None
        ]
        others += [name for name in ("prompt_vocab_size", "mrope_position_deltas") if reader.integer(name)]
        if others:
            raise InvalidArgument("got both ", sent.name, " and ", Name(others[0]), ": send one of them")
        if context.pictures is None:
            raise Unsupported(sent.name, " is not available: nothing encodes pictures here")
        self._picture_name = sent.name
        vocab_size, special_tokens = context.description.limits.vocab_size, context.encoder.special_tokens
        return sent.encode(context.pictures, text, vocab_size, special_tokens)

    def prompt(self, prompt_text: str | None, encoded: EncodedPrompt | Sequence[int] | None) -> Prompt:
        """Return the request for the engine, validated, with the options of its reply.

        Args:
            prompt_text: The prompt's text; None if the client sent ids.
            encoded: The ids of the text, or the text with its pictures; None if the client sent ids.
        """
        reader, context, said = self._reader, self._context, self._context.parameters
        sampling = read_sampling_config(reader)
        wanted = wanted_outputs(
            reader, context.naming, self._is_in_batch, context.decoupled and sampling.num_sequences > 1
        )
        exclude_input = self._exclude_input()
        streaming = self._streaming()
        token_ids, identity, table, rotary = self._content(encoded)
        stop_strings = tuple(word for word in reader.texts("stop_words") if word)
        drafted = read_drafting(reader, context.has_draft_model)
        make = partial(DraftedRequest, **drafted) if drafted else Request
        request = make(
            request_id=0,
            input_token_ids=token_ids,
            max_new_tokens=self._max_new_tokens(),
            # A request with a draft model always streams, as each round of drafts gives a response.
            streaming=engine_streams(streaming, stop_strings, sampling.uses_beams) or bool(drafted),
            end_ids=self._end_ids(prompt_text is not None),
            pad_id=self._pad_id(),
            sampling=sampling,
            output=output_config(reader, wanted, exclude_input),
            stop_words=self._stop_words(stop_strings if sampling.uses_beams else ()),
            bad_words=self._bad_words(),
            embedding_bias=read_bias(reader, context.description.limits.vocab_size, context.encoder),
            draft=read_draft(reader),
            guide=read_guide(reader),
            prompt_lookup_num_tokens=reader.integer("prompt_lookup_num_tokens") or 0,
            logits_post_processor_name=reader.text("logits_post_processor_name") or "",
            identity=identity,
            retention=read_retention(reader),
            priority=_first(reader.real("priority"), said.priority, _DEFAULT_PRIORITY),
            client_id=_first(reader.integer("client_id"), said.client_id, 0),
            allotted_time_ms=_first(reader.integer("allotted_time_ms"), said.allotted_time_ms, 0),
            lora=read_lora(reader),
            prompt_table=table,
            rotary_table=rotary,
        )
        self._validate(request, streaming, prompt_text is not None)
        options = ReplyOptions(
            outputs=wanted,
            named=context.naming.requested if context.naming.named else frozenset(),
            streaming=streaming,
            prompt_text=prompt_text,
            include_prompt=not exclude_input and not streaming,
            stop_strings=stop_strings,
            skip_special_tokens=context.skip_special_tokens,
            vocab_size=context.description.limits.vocab_size,
            offered=context.description.limits.additional_outputs,
        )
        return Prompt(request, options)

    def _content(
        self, encoded: EncodedPrompt | Sequence[int] | None
    ) -> tuple[tuple[int, ...], PrefixIdentity, PromptTable | None, RotaryTable | None]:
        """Return the prompt's ids and identity (`_prompt_ids`), its prompt table and its rotary positions."""
        reader = self._reader
        if isinstance(encoded, EncodedPrompt):
            extra_ids = read_picture_ids(reader, encoded.extra_ids)
            identity = replace(read_identity(reader), extra_ids=extra_ids)
            return encoded.token_ids, identity, encoded.table, encoded.rotary
        table = read_prompt_table(reader)
        token_ids, identity = self._prompt_ids(encoded, table)
        rotary_dim = self._context.description.limits.rotary_dim
        return token_ids, identity, table, read_rotary_table(reader, len(token_ids), rotary_dim)

    def _prompt_ids(
        self, encoded: Sequence[int] | None, table: PromptTable | None
    ) -> tuple[tuple[int, ...], PrefixIdentity]:
        """Return the prompt's ids, and the values besides ids that must be equal for prompts to share KV blocks.

        If the prompt is a text with a prompt table, the ids of the table's rows precede the text's ids, as
        in tensorrtllm_backend's preprocessing.
        """
        if encoded is None:
            token_ids, extra_ids = self._sent_ids()
        else:
            first, count = self._context.description.limits.vocab_size, table.num_rows if table else 0
            token_ids = (*range(first, first + count), *encoded)
            extra_ids = read_extra_ids(self._reader, count, len(token_ids))
        return token_ids, replace(read_identity(self._reader), extra_ids=extra_ids)

    def _sent_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the client sent as the prompt, and their extra ids."""
        reader = self._reader
        ids = reader.array("input_ids")
        length = reader.integer("input_lengths")
        if ids is None:
            text = Name(reader.shown_name("text_input"))
            names = (text,) if reader.has_text_vocabulary else (Name("input_ids"), ", or ", text)
            raise InvalidArgument("a value is required for ", *names, ": it is missing or empty")
        if length is None:
            length = ids.size
        if not 1 <= length <= ids.size:
            raise InvalidArgument(
                Name("input_lengths"),
                f" must be from 1 to {ids.size}, the length of ",
                Name("input_ids"),
                f", got {length}",
            )
        extra_ids = reader.integers("prompt_table_extra_ids") or ()
        # In a batch, both the ids and the extra ids of a shorter prompt are padded.
        used = extra_ids[:length] if len(extra_ids) == ids.size else extra_ids
        return tuple(ids[:length].tolist()), tuple(used)

    def _max_new_tokens(self) -> int:
        value = self._reader.integer("request_output_len")
        if value is None:
            name = Name(self._reader.shown_name("request_output_len"))
            raise InvalidArgument("a value is required for ", name, ": it is missing")
        return value

    def _streaming(self) -> bool:
        streaming = bool(self._reader.boolean("streaming"))
        if streaming and not self._context.decoupled:
            raise InvalidArgument(
                Name(self._reader.shown_name("streaming")),
                " is true, but this model gives one response to a request: leave it out, or send it to a model in "
                "decoupled mode, as tensorrt_llm and ensemble are unless they are served with decoupled_mode "
                "false",
            )
        return streaming

    def _end_ids(self, is_text: bool) -> tuple[int, ...]:
        """Return the end ids: end_id if sent (-1: none), else the default, which differs for texts and ids."""
        end_id, several = self._reader.integer("end_id"), self._context.parameters.end_ids
        if end_id is None and several is not None:
            return several
        if end_id is None:
            description = self._context.description
            return description.eos_token_ids if is_text else description.default_end_ids
        if end_id < NO_ID:
            raise InvalidArgument(Name("end_id"), f" must be a token id, or -1 for none, got {end_id}")
        return () if end_id == NO_ID else (end_id,)

    def _pad_id(self) -> int | None:
        pad_id = self._reader.integer("pad_id")
        if pad_id is not None and pad_id < NO_ID:
            raise InvalidArgument(Name("pad_id"), f" must be >= -1 (-1: none), got {pad_id}")
        return None if pad_id == NO_ID else pad_id

    def _stop_words(self, texts: tuple[str, ...]) -> Words:
        """Return stop words as ids: words sent as ids, and for beam search also the encoded stop texts."""
        words = read_words(self._reader, "stop_words_list")
        return words + tuple(ids for text in texts for ids in self._context.encoder.spellings(text))

    def _bad_words(self) -> Words:
        words = read_words(self._reader, "bad_words_list")
        texts = [text for text in self._reader.texts("bad_words") if text]
        return words + tuple(ids for text in texts for ids in self._context.encoder.spellings(text))

    def _exclude_input(self) -> bool:
        value = self._reader.boolean("exclude_input_in_output")
        return self._context.exclude_input_in_output if value is None else value

    def _validate(self, request: Request, streaming: bool, is_text: bool) -> None:
        try:
            request.validate(self._context.description.limits)
            if streaming and request.sampling.uses_beams and request.output.return_generation_logits:
                raise InvalidArgument(
                    "generation_logits cannot be streamed with ",
                    Name("beam_width"),
                    " > 1, because beams change: leave ",
                    Name("streaming"),
                    " or generation_logits out",
                )
        except InvalidArgument as error:
            shown = {"input_ids": "text_input"} if is_text else {}
            if self._picture_name:
                shown |= dict.fromkeys(TABLE_TENSORS, self._picture_name)
            raise error.with_names(lambda name: shown.get(name) or self._reader.shown_name(name)) from None


def _first(tensor: _Number | None, parameter: _Number | None, default: _Number) -> _Number:
    """Return the prompt's tensor if it was sent, else the request's parameter if it was sent, else the default."""
    if tensor is not None:
        return tensor
    return default if parameter is None else parameter
