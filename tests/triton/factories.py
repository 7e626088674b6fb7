"""Factories with keyword defaults, and fakes of what stands around the front end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from inflight.config import Parameters, Role, read_parameters
from inflight.core.ports import SendResponseCallback, WaitUntilSent
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import EngineDescription, ModelLimits, Request
from inflight.core.request.response import Response, Result
from inflight.core.request.stop import FinishReason, StopReason
from inflight.errors import InflightError
from inflight.serving.completion_text import CompletionText
from inflight.serving.in_flight import InFlightRequest
from inflight.serving.reply import Prompt, Reply, ReplyOptions
from inflight.serving.text_encoder import NO_TEXT
from inflight.triton.host import ModelArgs
from inflight.triton.requests import Naming, ServingContext
from inflight.triton.responses import TritonStream
from inflight.triton.tensor_reader import NUMPY_TYPES, TensorReader
from inflight.triton.tensor_spec import TensorSpec, Vocabulary
from inflight.triton.tensors import INPUTS, OUTPUTS
from tests.triton.fake_pb_utils import COMPLETE_FINAL, InferenceRequest, ResponseSender

ALL_OUTPUTS = frozenset(spec.name for spec in OUTPUTS.specs)


def scalar(name: str, value: object, vocabulary: Vocabulary = Vocabulary.TOKENS) -> np.ndarray:
    """A scalar as a model sees it: shape [1], in the table's type. `name` may be an alias."""
    return np.array([value], dtype=numpy_type(name, vocabulary))


def array(name: str, value: object, vocabulary: Vocabulary = Vocabulary.TOKENS) -> np.ndarray:
    """An array as a model sees it, the batch dimension included by the caller."""
    return np.array(value, dtype=numpy_type(name, vocabulary))


def numpy_type(name: str, vocabulary: Vocabulary = Vocabulary.TOKENS) -> type:
    return NUMPY_TYPES[dict(INPUTS.declared(vocabulary))[name].dtype]


def token_inputs(**tensors: object) -> dict[str, np.ndarray]:
    """The inputs of a small request by ids; scalars may be given bare, None leaves a default out."""
    given: dict[str, object] = {"input_ids": [[5, 6, 7]], "request_output_len": 4} | tensors
    return as_inputs(given, Vocabulary.TOKENS)


def text_inputs(**tensors: object) -> dict[str, np.ndarray]:
    """The inputs of a small request in the words of `ensemble`."""
    given: dict[str, object] = {"text_input": b"hello", "max_tokens": 4} | tensors
    return as_inputs(given, Vocabulary.TEXT)


def as_inputs(given: dict[str, object], vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    made = {}
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            made[name] = value
        elif value is not None:
            make = array if isinstance(value, list) else scalar
            made[name] = make(name, value, vocabulary)
    return made


def wire(spec: TensorSpec, value: object) -> np.ndarray:
    """One value in any row's shape: every element is `value`."""
    shape = [3 if length == -1 else length for length in spec.dims]
    return np.full([1, *shape], value, dtype=NUMPY_TYPES[spec.dtype])


def make_reader(
    inputs: dict[str, np.ndarray] | None = None, vocabulary: Vocabulary = Vocabulary.TOKENS
) -> TensorReader:
    inputs = token_inputs() if inputs is None else inputs
    return TensorReader(inputs, INPUTS, vocabulary)


def make_limits(**changes: int) -> ModelLimits:
    return replace(
        ModelLimits(
            1000,
            max_sequence_length=64,
            max_input_length=60,
            num_blocks=64,
            tokens_per_block=8,
            max_beam_width=4,
            max_adapter_rank=64,
            max_draft_length=8,
            logits_post_processors=("upper",),
        ),
        **changes,
    )


def make_description(**changes: object) -> EngineDescription:
    return replace(EngineDescription(make_limits(), eos_token_ids=(2, 3)), **changes)


def make_context(**changes: object) -> ServingContext:
    return replace(
        ServingContext(
            make_description(),
            decoupled=True,
            exclude_input_in_output=False,
            naming=Naming(ALL_OUTPUTS, named=False),
            encoder=NO_TEXT,
        ),
        **changes,
    )


def make_parameters(role: Role = Role.ENGINE, max_batch_size: int = 8, **values: str) -> Parameters:
    return read_parameters(make_model_config(max_batch_size, **values), role)


def make_model_args(parameters: Parameters | None = None, decoupled: bool = True) -> ModelArgs:
    return ModelArgs("a_model", Path("a_model", "1"), decoupled, parameters or make_parameters(), {})


def make_model_config(max_batch_size: int = 8, decoupled: bool = True, **values: str) -> dict[str, object]:
    return {
        "name": "a_model",
        "max_batch_size": max_batch_size,
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": {key: {"string_value": value} for key, value in values.items()},
    }


def make_prompt(
    outputs: frozenset[str] = ALL_OUTPUTS, options: dict[str, object] | None = None, **request: object
) -> Prompt:
    return Prompt(make_request(**request), ReplyOptions(outputs, **(options or {})))


def make_result(
    ids: Sequence[int] = (8, 9), reason: FinishReason = FinishReason.NOT_FINISHED, **changes: object
) -> Result:
    """A result of one sequence; a reason makes it the last."""
    result = Result(
        (tuple(ids),),
        num_input_tokens=3,
        num_output_tokens=(len(ids),),
        finish_reasons=(reason,),
        is_sequence_final=reason is not FinishReason.NOT_FINISHED,
    )
    return replace(result, **changes)


def make_beams(
    *beams: Sequence[int], reason: FinishReason = FinishReason.LENGTH, **changes: object
) -> Result:
    """The beams of one search, best first."""
    result = Result(
        tuple(tuple(ids) for ids in beams),
        num_input_tokens=3,
        num_output_tokens=tuple(len(ids) for ids in beams),
        finish_reasons=(reason,) * len(beams),
        is_sequence_final=reason is not FinishReason.NOT_FINISHED,
    )
    return replace(result, **changes)


def make_response(
    engine_id: int, ids: Sequence[int] = (8,), reason: FinishReason | None = None, **result: object
) -> Response:
    """A delta, or with a reason the final response."""
    final = reason is not None
    return Response(
        engine_id, make_result(ids, reason or FinishReason.NOT_FINISHED, **result), is_final=final
    )


def make_stream(sender: ResponseSender | None = None) -> TritonStream:
    return TritonStream(sender or ResponseSender(), COMPLETE_FINAL)


def make_reply(
    *prompts: Prompt, in_one: bool = False, new_text: Callable[[], CompletionText] | None = None
) -> Reply:
    return Reply([(prompt, new_text) for prompt in prompts or (make_prompt(),)], in_one)


def make_entry(
    client_request_id: str = "", sender: ResponseSender | None = None, reply: Reply | None = None
) -> InFlightRequest:
    return InFlightRequest(client_request_id, make_stream(sender), reply or make_reply())


def make_request(**changes: object) -> Request:
    return replace(Request(0, (5, 6, 7), max_new_tokens=4), **changes)


def make_triton_request(
    inputs: dict[str, np.ndarray] | None = None, request_id: str = "", outputs: frozenset[str] = ALL_OUTPUTS
) -> InferenceRequest:
    return InferenceRequest(token_inputs() if inputs is None else inputs, sorted(outputs), request_id)


@dataclass(slots=True)
class FakeEngineClient:
    """An EngineClient whose engine is the test: it says when which response comes.

    Attributes:
        description: What `describe` returns; an error is raised instead.
        refusal: What `submit` raises.
        submitted: Requests by the id they got.
        stopped: (id, reason) in order.
        read_state: What `state` does.
        carry_out: What `adapters` does.
        answers_stops: Whether a stop is followed at once by the final response, as `close` always is.
    """

    description: EngineDescription | InflightError = field(default_factory=make_description)
    refusal: InflightError | None = None
    submitted: dict[int, Request] = field(default_factory=dict)
    stopped: list[tuple[int, StopReason]] = field(default_factory=list)
    read_state: Callable[[float], str] = lambda timeout_s: "{}"
    carry_out: Callable[[AdapterCommand], tuple[AdapterState, ...]] = lambda command: ()
    answers_stops: bool = True
    closed: bool = False
    outboxes: list[WaitUntilSent] = field(default_factory=list)
    _callbacks: dict[int, SendResponseCallback] = field(default_factory=dict)

    def describe(self) -> EngineDescription:
        if isinstance(self.description, InflightError):
            raise self.description
        return self.description

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        if self.refusal is not None:
            raise self.refusal
        engine_id = 100 + len(self.submitted)
        self.submitted[engine_id] = replace(request, request_id=engine_id)
        self._callbacks[engine_id] = on_response
        return RequestHandle(engine_id, self.stop)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        self.stopped.append((request_id, reason, *(() if sequence_index is None else (sequence_index,))))
        if self.answers_stops and request_id in self._callbacks:
            self.respond(make_response(request_id, (), FinishReason.CANCELLED))

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        self.outboxes.append(wait_until_sent)

    def state(self, timeout_s: float) -> str:
        return self.read_state(timeout_s)

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        return self.carry_out(command)

    def close(self) -> None:
        self.closed = True
        for engine_id in list(self._callbacks):
            self.respond(make_response(engine_id, (), FinishReason.CANCELLED))

    def respond(self, response: Response) -> None:
        """Let the engine answer; after the final response nothing more may come."""
        on_response = self._callbacks[response.request_id]
        if response.is_final:
            del self._callbacks[response.request_id]
        on_response(response)

    @property
    def last_id(self) -> int:
        return max(self.submitted)
