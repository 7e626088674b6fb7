"""From a Triton request's tensors to frozen Requests and what the front end itself has to remember of each.

Owns the meaning of prompts, ends, word lists and stop requests; how tokens are chosen stands in
`sampling_tensors`, how KV blocks are shared and kept in `cache_tensors`, what comes back in `wanted_outputs`.
Does not register, submit or answer anything: whatever is wrong is raised before the engine knows of the request.
Runs on the thread that calls execute, or for long texts on one of those beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from inflight.core.request.request import EngineDescription, Request
from inflight.errors import InvalidArgument
from inflight.serving.text_encoder import TextEncoder
from inflight.triton.cache_tensors import read_identity, read_retention
from inflight.triton.request_parameters import NO_PARAMETERS, RequestParameters
from inflight.triton.sampling_tensors import read_bias, read_draft, read_sampling_config
from inflight.triton.tensor_reader import TensorReader, each_row
from inflight.triton.wanted_outputs import Naming, output_config, wanted_outputs
from inflight.triton.word_lists import LAYOUT, Words, read_word_list

NO_ID = -1
_DEFAULT_PRIORITY = 0.5

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class ServingContext:
    """What the meaning of a request depends on beside its tensors.

    Attributes:
        description: The engine behind this model.
        decoupled: Whether a request may have more than one response.
        exclude_input_in_output: Whether the prompt is left out by default.
    """

    description: EngineDescription
    decoupled: bool
    exclude_input_in_output: bool


@dataclass(frozen=True, slots=True)
class FrontEndOptions:
    """What of a prompt the engine need not know.

    Attributes:
        outputs: Names of the outputs to return, as far as there is something to say.
        streaming: Whether the client wants responses as they come. The engine may stream all the same.
        prompt_text: The prompt as it came, None if it came as ids.
        include_prompt: Whether text_output starts with the prompt.
        stop_strings: Texts that end the output.
        vocab_size: Values in a row of logits.
    """

    outputs: frozenset[str]
    streaming: bool = False
    prompt_text: str | None = None
    include_prompt: bool = False
    stop_strings: tuple[str, ...] = ()
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a Triton request.

    Attributes:
        request: For the engine; its `request_id` is 0: the engine client gives it one.
        options: For the front end.
    """

    request: Request
    options: FrontEndOptions


def wants_stop(reader: TensorReader) -> bool:
    """Whether this is a request to end another one; then none of its other tensors mean anything."""
    return any(row.boolean("stop") for row in reader.rows())


def wants_state(reader: TensorReader) -> bool:
    """Whether this asks for the batcher's state; then none of its other tensors mean anything."""
    return any(row.boolean("state") for row in reader.rows())


def client_of(reader: TensorReader, parameters: RequestParameters) -> int:
    """Whose request this is, of a batch the first prompt's; 0 for a client without a name."""
    return _first(reader.rows()[0].integer("client_id"), parameters.client_id, 0)


def convert(
    reader: TensorReader,
    naming: Naming,
    context: ServingContext,
    encoder: TextEncoder,
    parameters: RequestParameters = NO_PARAMETERS,
) -> tuple[Prompt, ...]:
    """The prompts of one Triton request, one for each row of its batch.

    Raises InvalidArgument or Unsupported; the message names the tensor by the client's name for it, what came,
    what was expected, and the row where there are several. The requests are valid for the engine that `context`
    describes.
    """
    readers = reader.rows()
    in_batch = len(readers) > 1
    rows = [_Row(row, naming, context, encoder, parameters, in_batch) for row in readers]
    texts = each_row([row.prompt_text for row in rows])
    to_encode = [text for text in texts if text is not None]
    encoded = iter(encoder.prompts(to_encode) if to_encode else ())
    ids = [None if text is None else next(encoded) for text in texts]
    return tuple(each_row([partial(row.prompt, *pair) for row, *pair in zip(rows, texts, ids)]))


class _Row:
    """One prompt's tensors, and what they depend on."""

    def __init__(
        self,
        reader: TensorReader,
        naming: Naming,
        context: ServingContext,
        encoder: TextEncoder,
        parameters: RequestParameters,
        in_batch: bool,
    ) -> None:
        self._reader = reader
        self._naming = naming
        self._context = context
        self._encoder = encoder
        self._parameters = parameters
        self._in_batch = in_batch

    def prompt_text(self) -> str | None:
        """The prompt, if it came as text."""
        reader = self._reader
        reader.refuse_unbuilt()
        text = reader.text("text_input")
        if text is None:
            return None
        if reader.array("input_ids") is not None:
            raise InvalidArgument("got both input_ids and text_input: send the prompt in one of them")
        length = reader.integer("input_lengths")
        if length is not None:
            raise InvalidArgument(
                f"input_lengths is {length}, but it counts input_ids and text_input came instead"
            )
        return text

    def prompt(self, prompt_text: str | None, encoded: Sequence[int] | None) -> Prompt:
        """All of it. `encoded` has the ids of `prompt_text`; both are None for a prompt that came as ids."""
        reader, context, said = self._reader, self._context, self._parameters
        sampling = read_sampling_config(reader)
        wanted = wanted_outputs(
            reader, self._naming, self._in_batch, context.decoupled and sampling.num_sequences > 1
        )
        exclude_input = self._exclude_input()
        streaming = self._streaming()
        stop_strings = tuple(word for word in reader.texts("stop_words") if word)
        request = Request(
            request_id=0,
            input_token_ids=self._prompt_ids() if encoded is None else tuple(encoded),
            max_new_tokens=self._max_new_tokens(),
            # Where text ends a sequence, somebody has to look at it while it is being made.
            streaming=streaming or (bool(stop_strings) and not sampling.uses_beams),
            end_ids=self._end_ids(prompt_text is not None),
            pad_id=self._pad_id(),
            sampling=sampling,
            output=output_config(reader, wanted, exclude_input),
            stop_words=self._stop_words(stop_strings if sampling.uses_beams else ()),
            bad_words=self._bad_words(),
            embedding_bias=read_bias(reader, context.description.limits.vocab_size, self._encoder),
            draft=read_draft(reader),
            prompt_lookup_num_tokens=reader.integer("prompt_lookup_num_tokens") or 0,
            identity=read_identity(reader),
            retention=read_retention(reader),
            priority=_first(reader.real("priority"), said.priority, _DEFAULT_PRIORITY),
            client_id=_first(reader.integer("client_id"), said.client_id, 0),
            allotted_time_ms=_first(reader.integer("allotted_time_ms"), said.allotted_time_ms, 0),
        )
        self._validate(request, streaming, prompt_text is not None)
        options = FrontEndOptions(
            outputs=wanted,
            streaming=streaming,
            prompt_text=prompt_text,
            include_prompt=not exclude_input and not streaming,
            stop_strings=stop_strings,
            vocab_size=context.description.limits.vocab_size,
        )
        return Prompt(request, options)

    def _prompt_ids(self) -> tuple[int, ...]:
        reader = self._reader
        ids = reader.array("input_ids")
        length = reader.integer("input_lengths")
        if ids is None:
            name = reader.shown_name("text_input" if reader.has_text_vocabulary else "input_ids")
            either = "" if reader.has_text_vocabulary else ", or text_input"
            raise InvalidArgument(f"a value is required for {name}{either}: it is missing or empty")
        if length is None:
            return tuple(ids.tolist())
        if not 1 <= length <= ids.size:
            raise InvalidArgument(
                f"input_lengths must be from 1 to {ids.size}, the length of input_ids, got {length}"
            )
        return tuple(ids[:length].tolist())

    def _max_new_tokens(self) -> int:
        value = self._reader.integer("request_output_len")
        if value is None:
            name = self._reader.shown_name("request_output_len")
            raise InvalidArgument(f"a value is required for {name}: it is missing")
        return value

    def _streaming(self) -> bool:
        streaming = bool(self._reader.boolean("streaming"))
        if streaming and not self._context.decoupled:
            raise InvalidArgument(
                f"{self._reader.shown_name('streaming')} is true, but this model gives one response to a request: "
                "leave it out, or send it to a model in decoupled mode, as tensorrt_llm and ensemble are unless "
                "they are served with decoupled_mode false"
            )
        return streaming

    def _end_ids(self, is_text: bool) -> tuple[int, ...]:
        """Absent: the defaults, which differ for text and ids. An explicit -1 means none either way."""
        end_id = self._reader.integer("end_id")
        if end_id is None:
            description = self._context.description
            return description.eos_token_ids if is_text else description.default_end_ids
        return () if end_id == NO_ID else (end_id,)

    def _pad_id(self) -> int | None:
        pad_id = self._reader.integer("pad_id")
        if pad_id is not None and pad_id < NO_ID:
            raise InvalidArgument(f"pad_id must be >= -1 (-1: none), got {pad_id}")
        return None if pad_id == NO_ID else pad_id

    def _stop_words(self, texts: tuple[str, ...]) -> Words:
        """As ids, and those texts that a beam search has to know as ids."""
        words = self._word_list("stop_words_list")
        return words + tuple(ids for text in texts for ids in self._encoder.spellings(text))

    def _bad_words(self) -> Words:
        words = self._word_list("bad_words_list")
        texts = [text for text in self._reader.texts("bad_words") if text]
        return words + tuple(ids for text in texts for ids in self._encoder.spellings(text))

    def _word_list(self, name: str) -> Words:
        try:
            array = self._reader.array(name)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}. {LAYOUT}") from None
        return () if array is None else read_word_list(array, self._reader.shown_name(name))

    def _exclude_input(self) -> bool:
        value = self._reader.boolean("exclude_input_in_output")
        return self._context.exclude_input_in_output if value is None else value

    def _validate(self, request: Request, streaming: bool, is_text: bool) -> None:
        try:
            request.validate(self._context.description.limits)
            if streaming and request.sampling.uses_beams and request.output.return_generation_logits:
                raise InvalidArgument(
                    "generation_logits cannot be streamed with beam_width > 1, because beams change: "
                    "leave streaming or generation_logits out"
                )
        except InvalidArgument as error:
            message = self._reader.in_client_names(str(error))
            shown = re.sub(r"\binput_ids\b", "text_input", message) if is_text else message
            raise InvalidArgument(shown) from None


def _first(tensor: _Number | None, parameter: _Number | None, default: _Number) -> _Number:
    """A tensor is the prompt's own; a parameter is said once for all prompts of a request."""
    if tensor is not None:
        return tensor
    return default if parameter is None else parameter
