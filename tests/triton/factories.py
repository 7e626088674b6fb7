"""Factories with keyword defaults, and fakes of the objects around the front end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from inflight.config import Parameters, Role
from inflight.core.ports import SendResponseCallback, WaitUntilSent
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason
from inflight.errors import InflightError
from inflight.parameter_reader import read_parameters
from inflight.prompt import Prompt
from inflight.serving.completion_text import CompletionText
from inflight.serving.in_flight import InFlightRequest
from inflight.serving.reply import Reply
from inflight.triton.host import ModelArgs
from inflight.triton.models.text_models import TextModel
from inflight.triton.responses import ResponseBuilder, TritonStream
from tests.tensors.factories import (
    ALL_OUTPUTS,
    make_description,
    make_prompt,
    make_result,
    token_inputs,
)
from tests.triton.fake_pb_utils import (
    COMPLETE_FINAL,
    FakePbUtils,
    InferenceRequest,
    InferenceResponse,
    ResponseSender,
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


def make_response(
    engine_id: int, ids: Sequence[int] = (8,), reason: FinishReason | None = None, **result: object
) -> Response:
    """Make a response: the final one if a finish reason is given, else one with new tokens."""
    final = reason is not None
    return Response(
        engine_id, make_result(ids, reason or FinishReason.NOT_FINISHED, **result), is_final=final
    )


def make_stream(sender: ResponseSender | None = None) -> TritonStream:
    return TritonStream(sender or ResponseSender(), COMPLETE_FINAL, ResponseBuilder(FakePbUtils()).error)


def make_reply(
    *prompts: Prompt, in_one: bool = False, new_text: Callable[[], CompletionText] | None = None
) -> Reply:
    return Reply([(prompt, new_text) for prompt in prompts or (make_prompt(),)], in_one)


def make_entry(
    client_request_id: str = "", sender: ResponseSender | None = None, reply: Reply | None = None
) -> InFlightRequest:
    return InFlightRequest(client_request_id, make_stream(sender), reply or make_reply())


def make_triton_request(
    inputs: dict[str, np.ndarray] | None = None, request_id: str = "", outputs: frozenset[str] = ALL_OUTPUTS
) -> InferenceRequest:
    return InferenceRequest(token_inputs() if inputs is None else inputs, sorted(outputs), request_id)


def response_of(model: TextModel, request: InferenceRequest) -> InferenceResponse:
    """Return a model's only response, which it gives at once or, to pictures, later."""
    (response,) = model.execute([request])
    if response is None:
        (sent,) = request.sender.wait_final()
        response = sent.response
    assert response is not None
    return response


@dataclass(slots=True)
class FakeEngineClient:
    """An EngineClient without an engine: the test decides which response comes when.

    Attributes:
        description: Result of `describe`; an error is raised instead.
        refusal: Error that `submit` raises.
        submitted: Requests by their ids.
        stopped: (id, reason) in order.
        read_state: Implements `state`.
        carry_out: Implements `adapters`.
        answers_stops: Whether a stop is followed at once by the final response, as after `close`.
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
        """Deliver a response of the engine; none may follow a final response."""
        on_response = self._callbacks[response.request_id]
        if response.is_final:
            del self._callbacks[response.request_id]
        on_response(response)

    @property
    def last_id(self) -> int:
        return max(self.submitted)
