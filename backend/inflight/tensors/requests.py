"""From a Triton request's tensors to frozen Requests and what the front end itself has to remember of each.

Owns the meaning of prompts, ends, word lists and stop requests, of how KV blocks are shared and kept, and which
outputs a request gets; how tokens are chosen stands in `sampling_tensors`. Does not check ranges, which
Request.validate does, and does not register, submit or answer anything: whatever is wrong is raised before the
engine knows of the request. Runs on the thread that calls execute, or for long texts on one of those beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from inflight.additional_outputs import outputs_of_tensors
from inflight.arrays import to_prompt_table
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import DEFAULT_PRIORITY, Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.adapter import PromptTable
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.request import EngineDescription, ModelLimits, OutputConfig, Request
from inflight.errors import InvalidArgument
from inflight.prompt import Prompt, ReplyOptions
from inflight.tensors.input_table import OUTPUTS, is_additional
from inflight.tensors.lora import read_lora
from inflight.tensors.reader import TensorReader, each_row
from inflight.tensors.request_parameters import NO_PARAMETERS, RequestParameters
from inflight.tensors.sampling import read_bias, read_draft, read_drafting, read_guide, read_sampling_config
from inflight.tensors.spec import TensorSpec, Vocabulary
from inflight.text import text_encoder
from inflight.text.text_encoder import TextEncoder

NO_ID = -1
_DEFAULT_PRIORITY = 0.5

MAX_WORD_IDS = 1 << 16
"""Most ids in all words of a list together."""

_WORD_LAYOUT = (
    "The first row holds the ids of all words, the second row after each word how many ids there are so far, "
    "filled up with -1: [[5,7,3,9,2],[3,5,-1,-1,-1]] for the words [5,7,3] and [9,2]"
)

_TEXT_LISTS = ("stop_words", "bad_words", "embedding_bias_words")

_ID_OUTPUTS = frozenset({"output_ids", "sequence_length"})
_TOP_OUTPUTS = frozenset({"top_log_prob_ids", "top_log_probs"})
_LOG_PROB_OUTPUTS = frozenset({"output_log_probs", "cum_log_probs", "cumulative_logprob"})
_METRIC_OUTPUTS = frozenset(spec.name for spec in OUTPUTS.specs if spec.asked_by == "return_perf_metrics")

_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"
_OPEN_ENDED = -1  # an end that is the prompt's, and a duration that has no end

_Number = TypeVar("_Number", int, float)
_Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Naming:
    """Which outputs a client names. It gets exactly these; one whose flag is not set has no elements.

    A Triton ensemble names whatever it hands on, be it wanted or not, so a name asks for nothing that has a flag.
    A client that names none, as HTTP generate never does, gets what the flags say.

    Attributes:
        requested: Names of outputs; all of the model's if the client named none.
        named: Whether it named them.
    """

    requested: frozenset[str]
    named: bool

    @classmethod
    def from_triton(
        cls, requested: frozenset[str], vocabulary: Vocabulary, declared: Collection[str] = ()
    ) -> Naming:
        """Read what Triton says: all outputs of the model stand for none named.

        Args:
            requested: Names of outputs.
            vocabulary: Whose names the model goes by.
            declared: Names of the outputs in its config.pbtxt; without any, those of the table. Those that the
                parameter additional_model_outputs adds are among them.
        """
        known = {name for name, _ in OUTPUTS.declared(vocabulary)} | {*filter(is_additional, declared)}
        return cls(requested & known, requested & known != (known & frozenset(declared) or known))


@dataclass(frozen=True, slots=True)
class ServingContext:
    """What the meaning of a request depends on beside its tensors.

    Attributes:
        description: The engine behind this model.
        decoupled: Whether a request may have more than one response.
        exclude_input_in_output: Whether the prompt is left out by default.
        naming: Which outputs its client names.
        encoder: Turns its texts into ids.
        parameters: What the request says beside its tensors.
        has_draft_model: Whether another model can draft tokens.
    """

    description: EngineDescription
    decoupled: bool
    exclude_input_in_output: bool
    naming: Naming
    encoder: TextEncoder
    parameters: RequestParameters = NO_PARAMETERS
    has_draft_model: bool = False


def wants_stop(reader: TensorReader) -> bool:
    """Whether this is a request to end another one; then none of its other tensors mean anything."""
    return any(row.boolean("stop") for row in reader.rows())


def wants_state(reader: TensorReader) -> bool:
    """Whether this asks for the batcher's state; then none of its other tensors mean anything."""
    return any(row.boolean("state") for row in reader.rows())


def client_id(reader: TensorReader, parameters: RequestParameters) -> int:
    """The id of the client whose request this is, of a batch the first prompt's; 0 for one without a name."""
    return _first(reader.rows()[0].integer("client_id"), parameters.client_id, 0)


def check_texts(reader: TensorReader, encoder: TextEncoder, limits: ModelLimits) -> None:
    """Refuse texts that are too long for this model, whatever they say, before anything looks at them.

    Raises:
        InvalidArgument: text_input has more bytes than the tokens of the longest prompt can stand for, or there
            are too many words or too long ones; the message names tensor, length and bound.
        Unsupported: A long text came, and there is no tokenizer.
    """
    for num_bytes in reader.text_sizes("text_input"):
        encoder.check_prompt_length(num_bytes, "text_input", limits)
    for name in _TEXT_LISTS:
        if reader.text_sizes(name):
            for row in reader.rows():
                text_encoder.check_words(row.text_sizes(name), row.shown_name(name))


def tokenizing_cost(reader: TensorReader) -> int:
    """Bytes of a prompt that take as long to tokenize as all texts of this request."""
    words = [size for name in _TEXT_LISTS for size in reader.text_sizes(name)]
    return text_encoder.tokenizing_cost(reader.text_sizes("text_input"), words)


def convert(reader: TensorReader, context: ServingContext) -> tuple[Prompt, ...]:
    """The prompts of one Triton request, one for each row of its batch.

    Raises InvalidArgument or Unsupported; the message names the tensor by the client's name for it, what came,
    what was expected, and the row where there are several. The requests are valid for the engine that `context`
    describes.
    """
    readers = reader.rows()
    rows = [_Row(row, context, is_in_batch=len(readers) > 1) for row in readers]
    texts = each_row([row.prompt_text for row in rows])
    to_encode = [text for text in texts if text is not None]
    encoded = iter(context.encoder.prompts(to_encode) if to_encode else ())
    ids = [None if text is None else next(encoded) for text in texts]
    prompts = tuple(each_row([partial(row.prompt, *pair) for row, *pair in zip(rows, texts, ids)]))
    num_sequences = sum(prompt.request.sampling.num_sequences for prompt in prompts)
    name = reader.shown_name("num_return_sequences")
    context.description.limits.check_sequences(len(prompts), num_sequences, name)
    return prompts


class _Row:
    """One prompt's tensors, and what their meaning depends on."""

    def __init__(self, reader: TensorReader, context: ServingContext, is_in_batch: bool) -> None:
        self._reader = reader
        self._context = context
        self._is_in_batch = is_in_batch

    def prompt_text(self) -> str | None:
        """The prompt's text; None if it came as ids."""
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
        """The whole prompt. `encoded` has the ids of `prompt_text`; both are None for one that came as ids."""
        reader, context, said = self._reader, self._context, self._context.parameters
        sampling = read_sampling_config(reader)
        wanted = wanted_outputs(
            reader, context.naming, self._is_in_batch, context.decoupled and sampling.num_sequences > 1
        )
        exclude_input = self._exclude_input()
        streaming = self._streaming()
        table = read_prompt_table(reader)
        token_ids, identity = self._prompt_ids(encoded, table)
        stop_strings = tuple(word for word in reader.texts("stop_words") if word)
        drafted = read_drafting(reader, context.has_draft_model)
        make = partial(DraftedRequest, **drafted) if drafted else Request
        request = make(
            request_id=0,
            input_token_ids=token_ids,
            max_new_tokens=self._max_new_tokens(),
            # Where text ends a sequence, somebody has to look at it while it is being made; drafts come in rounds.
            streaming=streaming or (bool(stop_strings) and not sampling.uses_beams) or bool(drafted),
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
        )
        self._validate(request, streaming, prompt_text is not None)
        options = ReplyOptions(
            outputs=wanted,
            named=context.naming.requested if context.naming.named else frozenset(),
            streaming=streaming,
            prompt_text=prompt_text,
            include_prompt=not exclude_input and not streaming,
            stop_strings=stop_strings,
            vocab_size=context.description.limits.vocab_size,
            offered=context.description.limits.additional_outputs,
        )
        return Prompt(request, options)

    def _prompt_ids(
        self, encoded: Sequence[int] | None, table: PromptTable | None
    ) -> tuple[tuple[int, ...], PrefixIdentity]:
        """The prompt's ids, and what its KV blocks depend on besides these.

        The rows of a text's table stand in front of it, as tensorrtllm_backend's preprocessing puts them.
        """
        if encoded is None:
            token_ids, extra_ids = self._sent_ids()
        else:
            first, count = self._context.description.limits.vocab_size, table.num_rows if table else 0
            token_ids = (*range(first, first + count), *encoded)
            extra_ids = read_extra_ids(self._reader, count, len(token_ids))
        return token_ids, replace(read_identity(self._reader), extra_ids=extra_ids)

    def _sent_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of a prompt that came as such, and their extra ids."""
        reader = self._reader
        ids = reader.array("input_ids")
        length = reader.integer("input_lengths")
        if ids is None:
            name = reader.shown_name("text_input" if reader.has_text_vocabulary else "input_ids")
            either = "" if reader.has_text_vocabulary else ", or text_input"
            raise InvalidArgument(f"a value is required for {name}{either}: it is missing or empty")
        if length is None:
            length = ids.size
        if not 1 <= length <= ids.size:
            raise InvalidArgument(
                f"input_lengths must be from 1 to {ids.size}, the length of input_ids, got {length}"
            )
        extra_ids = _integers(reader, "prompt_table_extra_ids") or ()
        # Behind a shorter prompt of a batch both are filled up.
        used = extra_ids[:length] if len(extra_ids) == ids.size else extra_ids
        return tuple(ids[:length].tolist()), tuple(used)

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
        """Without end_id the defaults, which differ for text and ids; an explicit -1 means none either way."""
        end_id, several = self._reader.integer("end_id"), self._context.parameters.end_ids
        if end_id is None and several is not None:
            return several
        if end_id is None:
            description = self._context.description
            return description.eos_token_ids if is_text else description.default_end_ids
        return () if end_id == NO_ID else (end_id,)

    def _pad_id(self) -> int | None:
        pad_id = self._reader.integer("pad_id")
        if pad_id is not None and pad_id < NO_ID:
            raise InvalidArgument(f"pad_id must be >= -1 (-1: none), got {pad_id}")
        return None if pad_id == NO_ID else pad_id

    def _stop_words(self, texts: tuple[str, ...]) -> _Words:
        """Stop words as ids: those that came so, and those texts that a beam search has to know as ids."""
        words = self._word_list("stop_words_list")
        return words + tuple(ids for text in texts for ids in self._context.encoder.spellings(text))

    def _bad_words(self) -> _Words:
        words = self._word_list("bad_words_list")
        texts = [text for text in self._reader.texts("bad_words") if text]
        return words + tuple(ids for text in texts for ids in self._context.encoder.spellings(text))

    def _word_list(self, name: str) -> _Words:
        try:
            array = self._reader.array(name)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}. {_WORD_LAYOUT}") from None
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
    """The prompt's own tensor if it came, else the parameter, which holds for all prompts of a request."""
    if tensor is not None:
        return tensor
    return default if parameter is None else parameter


# ---------------------------------------------------------------- outputs


def wanted_outputs(
    reader: TensorReader, naming: Naming, tells_prompts_apart: bool, tells_sequences_apart: bool
) -> frozenset[str]:
    """Names of the outputs that are asked for, as far as there is something to say.

    Additional outputs are asked for by their names, or by the tensor additional_outputs.

    Args:
        reader: One prompt's tensors, for the flags.
        naming: What the client named.
        tells_prompts_apart: Whether responses of several prompts come one by one.
        tells_sequences_apart: Whether responses of several sequences do.
    """
    left_out: set[str] = set()
    if reader.boolean("return_finish_reason") is False:
        left_out.add("finish_reason")
    if not (tells_prompts_apart or naming.named):
        left_out.add("batch_index")
    if not (tells_sequences_apart or naming.named):
        left_out.add("sequence_index")
    return frozenset(
        spec.name
        for spec in OUTPUTS.specs
        if spec.name in naming.requested
        and spec.name not in left_out
        and spec.built
        and _is_asked_for(spec, reader)
    ).union(_additional_outputs(reader, naming))


def _additional_outputs(reader: TensorReader, naming: Naming) -> Iterator[str]:
    """Yield those that are named, else those in the tensor; InvalidArgument for one that is not declared."""
    if naming.named:
        yield from filter(is_additional, naming.requested)
        return
    for name in filter(None, reader.texts("additional_outputs")):
        if name not in naming.requested or not is_additional(name):
            known = ", ".join(sorted(filter(is_additional, naming.requested))) or "none"
            raise InvalidArgument(
                f"additional_outputs has {name[:100]!r}, expected names of this model's additional outputs: "
                f"{known} (parameter additional_model_outputs)"
            )
        yield name


def output_config(reader: TensorReader, wanted: frozenset[str], exclude_input: bool) -> OutputConfig:
    """What the engine has to keep and send for these outputs."""
    return OutputConfig(
        # Nobody looks at the prompt's ids without these outputs: they need not come back.
        exclude_input_from_output=exclude_input or not wanted & _ID_OUTPUTS,
        return_log_probs=bool(wanted & _LOG_PROB_OUTPUTS),
        num_top_log_probs=(reader.integer("num_top_log_probs") or 0) if wanted & _TOP_OUTPUTS else 0,
        return_prompt_log_probs="prompt_log_probs" in wanted,
        return_context_logits="context_logits" in wanted,
        return_generation_logits="generation_logits" in wanted,
        return_perf_metrics=bool(wanted & _METRIC_OUTPUTS),
        additional_outputs=outputs_of_tensors(sorted(filter(is_additional, wanted))),
    )


def _is_asked_for(spec: TensorSpec, reader: TensorReader) -> bool:
    if spec.asked_by == "num_top_log_probs":
        return bool(reader.integer(spec.asked_by))
    if spec.asked_by == "lora_command":
        return bool(reader.text(spec.asked_by))
    return not spec.asked_by or bool(reader.boolean(spec.asked_by))


# ---------------------------------------------------------------- prompt tables


def read_prompt_table(reader: TensorReader) -> PromptTable | None:
    """The rows that ids beyond the vocabulary stand for; None without any.

    Raises InvalidArgument if prompt_vocab_size is not their number, or not all numbers are finite.
    """
    array, num_rows = reader.array("prompt_embedding_table"), reader.integer("prompt_vocab_size")
    found = 0 if array is None else len(array)
    if num_rows is not None and num_rows != found:
        came = "is missing" if array is None else f"has {found} rows"
        raise InvalidArgument(f"prompt_vocab_size is {num_rows}, but prompt_embedding_table {came}")
    return None if array is None else to_prompt_table(array, reader.shown_name("prompt_embedding_table"))


def read_extra_ids(reader: TensorReader, num_rows: int, length: int) -> tuple[int, ...]:
    """The extra ids of a text of `length` ids that begins with so many rows: the rows have one, the text has 0.

    A model of the other names takes one for each id.
    """
    if not reader.has_text_vocabulary:
        return tuple(_integers(reader, "prompt_table_extra_ids") or ())
    of_rows = reader.integer("prompt_table_extra_id") or 0
    return (of_rows,) * num_rows + (0,) * (length - num_rows) if of_rows and num_rows else ()


# ---------------------------------------------------------------- the KV cache


def read_identity(reader: TensorReader) -> PrefixIdentity:
    """What the prompt's KV blocks depend on besides its tokens and its table."""
    return PrefixIdentity(cache_salt_id=reader.integer("cache_salt_id") or 0)


def read_retention(reader: TensorReader) -> RetentionConfig:
    """How long the prompt's blocks are worth keeping; the defaults where no tensor says anything.

    Raises InvalidArgument if a range lacks a part; the message names the tensors and their lengths.
    """
    return RetentionConfig(_retention_ranges(reader), _decode_retention(reader))


def _retention_ranges(reader: TensorReader) -> tuple[TokenRangeRetention, ...]:
    starts = _integers(reader, _STARTS)
    if starts is None:
        for name in (_ENDS, _PRIORITIES, _DURATIONS):
            if _integers(reader, name) is not None:
                raise InvalidArgument(f"{_STARTS} must be provided: {name} came without it")
        return ()
    ends = _beside(reader, _ENDS, len(starts))
    priorities = _beside(reader, _PRIORITIES, len(starts))
    has_durations = _integers(reader, _DURATIONS) is not None
    durations = _beside(reader, _DURATIONS, len(starts)) if has_durations else [_OPEN_ENDED] * len(starts)
    return tuple(
        TokenRangeRetention(start, _none_if_open(end), Retention(priority, _none_if_open(duration)))
        for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
    )


def _decode_retention(reader: TensorReader) -> Retention | None:
    priority = reader.integer("retention_decode_priority")
    duration = reader.integer("retention_decode_duration_ms")
    if priority is None and duration is None:
        return None
    return Retention(DEFAULT_PRIORITY if priority is None else priority, _none_if_open(duration))


def _beside(reader: TensorReader, name: str, length: int) -> list[int]:
    """Returns the tensor `name`, which must have a number for each of `length` ranges."""
    values = _integers(reader, name)
    if values is None:
        raise InvalidArgument(f"{name} must be provided: {_STARTS} has {length} ranges")
    if len(values) != length:
        raise InvalidArgument(
            f"Invalid {name} length. Expected length {length}, as {_STARTS} has, got length {len(values)}"
        )
    return values


def _integers(reader: TensorReader, name: str) -> list[int] | None:
    array = reader.array(name)
    return None if array is None else array.tolist()


def _none_if_open(value: int | None) -> int | None:
    return None if value == _OPEN_ENDED else value


# ---------------------------------------------------------------- word lists


def read_word_list(array: np.ndarray, name: str) -> _Words:
    """The words of TensorRT-LLM's packed list, a [2, n] array.

    [[0], [-1]], an empty list as NVIDIA's clients send it, has no words. Ids after the last word's end are
    ignored: they fill up the shorter lists of a batch.

    Args:
        array: Integers, without the batch dimension.
        name: The tensor's name for the client.

    Raises:
        InvalidArgument: There are too many ids, or the rows or the end offsets are wrong; then the message shows
            the layout by an example.
    """
    if array.ndim != 2 or array.shape[0] != 2:
        raise _broken(name, f"must have two rows, shape [1, 2, n], got shape {list(array.shape)}")
    if array.shape[1] > MAX_WORD_IDS:
        raise InvalidArgument(
            f"{name} has {array.shape[1]} ids; this server takes at most {MAX_WORD_IDS} in a list of words"
        )
    ids, ends = array.tolist()
    count = ends.index(NO_ID) if NO_ID in ends else len(ends)
    if any(end != NO_ID for end in ends[count:]):
        raise _broken(name, f"has an end offset after -1 in its second row: {_shown(ends)}")
    starts = [0, *ends[: count - 1]] if count else []
    for start, end in zip(starts, ends):
        if end <= start:
            raise _broken(name, f"has an end offset {end} after {start}: they must grow, {_shown(ends)}")
        if end > len(ids):
            raise _broken(name, f"has the end offset {end}, but {len(ids)} ids")
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, ends))


def _broken(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name} {problem}. {_WORD_LAYOUT}")


def _shown(values: list[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', …' if len(values) > 8 else ''}]"
