"""From a Triton request's tensors to a frozen Request and what the front end itself has to remember.

Owns what each tensor means and its default. Does not register, submit or answer anything: whatever is wrong is
raised before anyone knows of the request. Runs on the thread that calls execute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.core.description import EngineDescription
from inflight.core.output_config import OutputConfig
from inflight.core.request import Request
from inflight.core.sampling_config import SamplingConfig
from inflight.errors import InvalidArgument
from inflight.triton.tensor_reader import TensorReader
from inflight.triton.tensor_spec import Vocabulary
from inflight.triton.tensors import INPUTS

Encode = Callable[[str], Sequence[int]]
"""Text to token ids; raises Unsupported where the model has no tokenizer."""

NO_ID = -1
_ID_OUTPUTS = frozenset({"output_ids", "sequence_length"})


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
    """What of a request the engine need not know.

    Attributes:
        requested_outputs: Names of the outputs to return; all of the model's if the client named none.
        streaming: Whether responses are deltas.
        return_num_input_tokens: Whether num_input_tokens may be returned.
        return_num_output_tokens: Whether num_output_tokens may be returned.
        prompt_text: The prompt as it came, None if it came as ids.
        include_prompt: Whether text_output starts with the prompt.
    """

    requested_outputs: frozenset[str]
    streaming: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    prompt_text: str | None = None
    include_prompt: bool = False


def wants_stop(reader: TensorReader) -> bool:
    """Whether this is a request to end another one; then none of its other tensors mean anything."""
    return bool(reader.boolean("stop"))


def refuse_misnamed(parameters: str, vocabulary: Vocabulary) -> None:
    """Raise InvalidArgument for a tensor of the other vocabulary among a Triton request's `parameters` (JSON).

    HTTP generate makes a parameter of every key that is no input of the model, and nobody reads those.
    """
    if not parameters or parameters == "{}":
        return
    own = {name for name, _ in INPUTS.declared(vocabulary)}
    (other,) = set(Vocabulary) - {vocabulary}
    for key in json.loads(parameters or "{}"):
        spec = INPUTS.sent_as(key, other)
        if spec is not None and key not in own:
            names = spec.names(vocabulary)
            called = f"here it is called {names[0]}" if names else "this model does not take it"
            raise InvalidArgument(f"{key} is not an input of this model: {called}")


def convert(
    reader: TensorReader, requested_outputs: frozenset[str], context: ServingContext, encode: Encode
) -> tuple[Request, FrontEndOptions]:
    """The request and its options.

    Raises InvalidArgument or Unsupported; the message names the tensor by the client's name for it, what came
    and what was expected. The request is valid for the engine that `context` describes. Its `request_id` is 0:
    the engine client gives it one.
    """
    reader.refuse_unbuilt()
    prompt_text = reader.text("text_input")
    exclude_input = _exclude_input(reader, context)
    request = Request(
        request_id=0,
        input_token_ids=_prompt_ids(reader, prompt_text, encode),
        max_new_tokens=_max_new_tokens(reader),
        streaming=_streaming(reader, context),
        end_ids=_end_ids(reader, context.description, prompt_text is not None),
        pad_id=_pad_id(reader),
        sampling=_sampling_config(reader),
        # Nobody looks at the prompt's ids without these outputs: they need not come back.
        output=OutputConfig(exclude_input or not requested_outputs & _ID_OUTPUTS),
    )
    _validate(request, context, reader, prompt_text is not None)
    options = FrontEndOptions(
        requested_outputs=requested_outputs,
        streaming=request.streaming,
        return_num_input_tokens=bool(reader.boolean("return_num_input_tokens")),
        return_num_output_tokens=bool(reader.boolean("return_num_output_tokens")),
        prompt_text=prompt_text,
        include_prompt=not exclude_input and not request.streaming,
    )
    return request, options


def _prompt_ids(reader: TensorReader, prompt_text: str | None, encode: Encode) -> tuple[int, ...]:
    ids = reader.array("input_ids")
    length = reader.integer("input_lengths")
    if prompt_text is not None:
        if ids is not None:
            raise InvalidArgument("got both input_ids and text_input: send the prompt in one of them")
        if length is not None:
            raise InvalidArgument(
                f"input_lengths is {length}, but it counts input_ids and text_input came instead"
            )
        return tuple(encode(prompt_text))
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


def _max_new_tokens(reader: TensorReader) -> int:
    value = reader.integer("request_output_len")
    if value is None:
        raise InvalidArgument(
            f"a value is required for {reader.shown_name('request_output_len')}: it is missing"
        )
    return value


def _streaming(reader: TensorReader, context: ServingContext) -> bool:
    streaming = bool(reader.boolean("streaming"))
    if streaming and not context.decoupled:
        raise InvalidArgument(
            f"{reader.shown_name('streaming')} is true, but this model gives one response to a request: "
            "send streaming requests to tensorrt_llm or ensemble"
        )
    return streaming


def _end_ids(reader: TensorReader, description: EngineDescription, is_text: bool) -> tuple[int, ...]:
    """Absent: the defaults, which differ for text and ids. An explicit -1 means none either way."""
    end_id = reader.integer("end_id")
    if end_id is None:
        return description.eos_token_ids if is_text else description.default_end_ids
    return () if end_id == NO_ID else (end_id,)


def _pad_id(reader: TensorReader) -> int | None:
    pad_id = reader.integer("pad_id")
    if pad_id is not None and pad_id < NO_ID:
        raise InvalidArgument(f"pad_id must be >= -1 (-1: none), got {pad_id}")
    return None if pad_id == NO_ID else pad_id


def _sampling_config(reader: TensorReader) -> SamplingConfig:
    default = SamplingConfig()
    temperature = reader.real("temperature")
    top_k = reader.integer("runtime_top_k")
    top_p = reader.real("runtime_top_p")
    seed = reader.integer("random_seed")
    return SamplingConfig(
        temperature=default.temperature if temperature is None else temperature,
        top_k=default.top_k if top_k is None else top_k,
        # Not max(): NaN has to get through to the check that refuses it.
        top_p=default.top_p if top_p is None or top_p <= 0 else top_p,
        random_seed=default.random_seed if seed is None else seed,
    )


def _exclude_input(reader: TensorReader, context: ServingContext) -> bool:
    value = reader.boolean("exclude_input_in_output")
    return context.exclude_input_in_output if value is None else value


def _validate(request: Request, context: ServingContext, reader: TensorReader, is_text: bool) -> None:
    try:
        request.validate(context.description.limits)
    except InvalidArgument as error:
        message = reader.in_client_names(str(error))
        raise InvalidArgument(message.replace("input_ids", "text_input") if is_text else message) from None
