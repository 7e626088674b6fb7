"""An engine client for an engine behind a tritonserver, on this host or another, over KServe's gRPC protocol.

Requests use gRPC streams of one connection (`kserve_streams`), without the header `triton_grpc_error`, which
can crash tritonserver 2.51. The connection is restored automatically; while the server is unreachable,
requests get Unavailable. When a sequence is stopped, its result ends at once, but the server's request is
ended only when all of its sequences have been stopped, because no tensor stops one sequence of several.

Owns one thread with an event loop. All methods pass their work to this thread, where responses also arrive,
so the state of requests needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import (  # pyright: ignore[reportMissingTypeStubs]  it has no types
    InferenceServerException,
    InferInput,
    InferRequestedOutput,
    aio,
)

from inflight.access_log import AccessLog
from inflight.core.ports import SendResponseCallback, WaitUntilSent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import FINISH_REASON_OF_STOP, StopReason
from inflight.endpoint.delivery import pass_on
from inflight.errors import (
    ERROR_KINDS,
    InflightError,
    StepFailed,
    Unavailable,
    Unsupported,
    error_from_kind,
    without_places,
)
from inflight.openai.kserve_description import describe
from inflight.openai.kserve_streams import Connection, InferArguments, InferResult, KServeStreams
from inflight.openai.kserve_tensors import (
    ended_result,
    input_tensors,
    output_names,
    read_result,
    request_parameters,
)
from inflight.tensors.input_table import INPUTS
from inflight.tensors.request_parameters import STRUCTURED_ERRORS

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CONFIG_S, _STATE_S = 5.0, 2.0
_FRESH_S = 1.0
"""Seconds for which a server that answered is assumed to be still reachable."""
_CHANNEL = [
    ("grpc.max_send_message_length", (1 << 31) - 1),
    ("grpc.max_receive_message_length", (1 << 31) - 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),  # gRPC's default waits up to two minutes after an outage
]
_STRUCTURED = re.compile(rf"({'|'.join(ERROR_KINDS)}): (.*)", re.DOTALL)
_MODEL_AWAY = re.compile(r"unknown model|not ready|no available versions|unload", re.IGNORECASE)


class KServeEngineClient:
    """An `EngineClient` for an engine behind a tritonserver's gRPC port.

    Args:
        url: HOST:PORT of the gRPC port.
        tokenizer_dir: The checkpoint's folder on this machine; its weights are not needed.
        model: Name of the engine's Triton model.

    Raises:
        ConfigError: The folder has no tokenizer.
    """

    def __init__(self, url: str, tokenizer_dir: str, model: str = "tensorrt_llm") -> None:
        self._url = url
        self._model = model
        self._describe = describe(tokenizer_dir)
        self._ids = itertools.count(1)
        self._name = uuid.uuid4().hex[:12]  # makes request ids unique among clients
        self._requests: dict[int, _RunningRequest] = {}
        self._closed = False
        self._access_log = AccessLog()
        self._describing = threading.Lock()
        self._description: EngineDescription | None = None
        self._config: object = None  # source of `_description`; None: to be read again
        self._seen_s = 0.0
        self._is_away = False
        self._connection: Connection | None = None
        self._streams: KServeStreams | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kserve-client", daemon=True)
        self._thread.start()

    def describe(self) -> EngineDescription:
        """Return the engine's description, from the server's model configuration and the tokenizer folder."""
        with self._describing:
            if self._description is None or time.monotonic() - self._seen_s > _FRESH_S:
                try:
                    config = self._call(self._ask_config(), _CONFIG_S)
                except InflightError as error:
                    self._config = None  # the next answer may come from another engine
                    if not (self._is_away or self._closed):
                        _log.warning("%s", error)
                    self._is_away = True  # further failures are not logged
                    raise
                self._is_away = False
                if config != self._config or self._description is None:
                    self._description = self._described(config, self._description)
                self._seen_s = time.monotonic()
            return self._description

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Send `request`. If the server cannot be reached, `on_response` gets one response with the error.

        Raises:
            Unavailable: This client is closed.
            Unsupported: A part of the request cannot be sent as a tensor.
        """
        request_id = next(self._ids)
        take = self._access_log.follow(request, request_id, on_response)
        running = _RunningRequest(replace(request, request_id=request_id), input_tensors(request), take)
        self._post(self._start, running)
        return RequestHandle(request_id, self.stop)

    def reserve_id(self) -> int:
        """Return an id that no request will have."""
        return next(self._ids)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End a request, or one of its sequences, early; ignore unknown ids."""
        if not self._closed:
            self._post(self._stop, request_id, reason, sequence_index)

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Do nothing: an engine on another host does not wait until this process has sent its responses."""

    def state(self, timeout_s: float) -> str:
        """Return the engine's state as JSON; raise Unsupported if the server does not provide it."""
        return self._call(self._ask_text("state", np.array([[True]]), "state"), timeout_s)

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Execute an adapter command; return all adapters after it. Raises the server's errors."""
        said: dict[str, Any] = {
            "command": command.action.value,
            "name": command.name,
            "path": command.path,
            "replace": command.replaces,
        }
        text = json.dumps({key: value for key, value in said.items() if value} | _task_id(command))
        told = self._call(self._ask_text("lora_command", _as_text(text), "adapters"), timeout_s)
        return tuple(AdapterState(**each) for each in json.loads(told)["adapters"])

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Raise Unsupported, because KServe's protocol has no such command."""
        raise Unsupported("an engine behind a tritonserver on another host is not made to sleep here")

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Raise Unsupported, because KServe's protocol cannot transmit reports."""
        raise Unsupported("a tritonserver does not return statistics of iterations over KServe's protocol")

    def close(self) -> None:
        """Close the connection; answer requests in flight with Unavailable. Idempotent."""
        if self._closed:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.close()
        self._access_log.close()

    def _described(self, config: Any, known: EngineDescription | None) -> EngineDescription:
        """Return the description of an engine with this configuration; return the object `known` if it is equal.

        If the configuration does not specify the size of the KV cache, the size is read from the server's
        state, if the server provides it.
        """
        found, num_blocks = self._describe(config, None), None
        self._config = config
        if found.state_enabled:
            try:
                num_blocks = json.loads(self.state(_STATE_S))["batcher"]["state"]["blocks"]["total"]
            except (InflightError, KeyError, TypeError) as error:  # an engine that hangs returns no state
                self._config = None
                _log.warning("the size of the KV cache is not known, as there is no state: %s", error)
        found = self._describe(config, num_blocks)
        return known if known is not None and known == found else found

    # ---------------------------------------------------------------- calls from other threads to the event loop

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")
        self._loop.call_soon_threadsafe(function, *arguments)

    def _call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        if self._closed:
            coroutine.close()
            raise Unavailable("the server is shutting down")
        answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return answer.result(timeout_s)
        except NotInTime:
            answer.cancel()
            raise Unavailable(f"the tritonserver at {self._url} did not answer in {timeout_s:g} s") from None
        except CancelledError:  # by `close`
            raise Unavailable("the server is shutting down") from None

    # ---------------------------------------------------------------- on the event loop's thread

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = aio.InferenceServerClient(self._url, channel_args=_CHANNEL)
            self._streams = KServeStreams(self._connection)
        return self._connection

    async def _ask_config(self) -> object:
        """Return KServe's ModelConfig as JSON."""
        try:
            if not await self._connected().is_model_ready(self._model):
                raise Unavailable(f"the model {self._model} of the tritonserver at {self._url} is not ready")
            config = await self._connected().get_model_config(self._model, as_json=True)
        except (InferenceServerException, grpc.RpcError) as error:
            raise self._error(error) from error
        return config["config"]

    async def _ask_text(self, name: str, array: NDArray[Any], output: str) -> str:
        """Return the text of the single response to a request with one input tensor."""
        text = ""
        responses = self._responses({name: array}, [output], {STRUCTURED_ERRORS: True})
        async for result, _ in responses:
            if (told := result.as_numpy(output)) is not None:
                text = told.ravel()[0].decode()
        return text

    def _start(self, running: _RunningRequest) -> None:
        self._requests[running.request.request_id] = running
        running.task = self._loop.create_task(self._run(running))

    async def _run(self, running: _RunningRequest) -> None:
        request = running.request
        try:
            client_id = "" if request.origin is None else request.origin.request_id
            responses = self._responses(
                running.inputs, output_names(request), request_parameters(request), client_id
            )
            async with contextlib.aclosing(responses):
                async for result, is_final in responses:
                    running.take(result, is_final)
            running.fail(Unavailable(f"{self._url} closed the stream before its last response"))
        except InflightError as error:
            running.fail(error)
        except Exception as error:  # a bug in one request must not leave its client without an answer
            _log.exception(
                "a response of request %d could not be read", request.request_id, extra=request.log_extra
            )
            running.fail(StepFailed(without_places(f"a response could not be read: {error!r}")))
        finally:
            self._requests.pop(request.request_id, None)

    async def _responses(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: list[str],
        parameters: Mapping[str, str | bool],
        client_id: str = "",
    ) -> AsyncGenerator[tuple[InferResult, bool], None]:
        """Yield (response, whether it is the last) for each response to one request; raise the server's errors.

        The request's id begins with the client's, so that it is found in the log of the server.

        Closing the generator before the last response cancels the request.
        """
        asked: InferArguments = {
            "model_name": self._model,
            "inputs": [_input(name, array) for name, array in inputs.items()],
            "outputs": [InferRequestedOutput(name) for name in outputs],
            "request_id": f"{client_id}-{self._name}-{next(self._ids)}".lstrip("-"),
            "parameters": {"triton_enable_empty_final_response": True, **parameters},
        }
        self._connected()
        assert self._streams is not None, "set together with the connection"
        try:
            async with contextlib.aclosing(self._streams.ask(asked)) as responses:
                async for response in responses:
                    yield response
        except (InferenceServerException, grpc.RpcError) as error:
            raise self._error(error) from error

    def _stop(self, request_id: int, reason: StopReason, sequence_index: int | None) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.stop(reason, sequence_index)

    def _error(self, error: Exception) -> InflightError:
        """Map a tritonclient or gRPC error to this package's error class."""
        if isinstance(error, InferenceServerException):
            message, status = _parts(error)
        else:
            assert isinstance(error, grpc.RpcError)
            message, status = error.details() or "", error.code().name
        if structured := _STRUCTURED.match(message):
            with contextlib.suppress(ValueError):  # the kind is not one of this package's
                return error_from_kind(structured[1], structured[2])
        if "protocol is restricted" in message:
            return Unavailable(
                f"the tritonserver at {self._url} does not return its models' configurations: start it with "
                "--allow-model-config"
            )
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            return Unavailable(f"the tritonserver at {self._url} cannot be reached: {message}")
        if _MODEL_AWAY.search(message):
            return Unavailable(f"the tritonserver at {self._url} does not serve {self._model} now: {message}")
        return StepFailed(f"the tritonserver at {self._url} failed: {message}")

    async def _close(self) -> None:
        self._closed = True
        for running in list(self._requests.values()):
            running.fail(Unavailable("the server is shutting down"))
        tasks = [running.task for running in self._requests.values() if running.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # streams that wait for their next request
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _RunningRequest:
    """One request in flight. It records which sequences have not ended, so that each ends exactly once."""

    def __init__(
        self, request: Request, inputs: Mapping[str, NDArray[Any]], on_response: SendResponseCallback
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.task: asyncio.Task[None] | None = None
        self._on_response = on_response
        self._unfinished = set(range(request.sampling.num_sequences))
        self._last: dict[int, SequenceResult] = {}

    @property
    def is_done(self) -> bool:
        """Return whether the final response was delivered."""
        return not self._unfinished

    def take(self, response: InferResult, is_final: bool) -> None:
        """Deliver a response, unless this client has stopped its sequence."""
        outputs = {name: response.as_numpy(name) for name in output_names(self.request)}
        found = {name: array for name, array in outputs.items() if array is not None}
        if found:
            index = int(found["sequence_index"].ravel()[0]) if "sequence_index" in found else 0
            result = read_result(self.request, found, is_final, is_first=index not in self._last)
            if index in self._unfinished:
                self._pass_on(result)
        if is_final and not self.is_done:
            self.fail(StepFailed("the server has ended the request, but not all of its sequences"))

    def stop(self, reason: StopReason, sequence_index: int | None) -> None:
        """Stop the sequence with this index, or all sequences if it is None."""
        asked = self._unfinished if sequence_index is None else self._unfinished & {sequence_index}
        for index in sorted(asked):
            last = self._last.get(index)
            self._pass_on(ended_result(self.request, last, index, FINISH_REASON_OF_STOP[reason]))
        self._end_if_done()

    def fail(self, error: InflightError) -> None:
        """Deliver an error, unless the request is done."""
        if not self.is_done:
            self._unfinished.clear()
            self._deliver(Response(self.request.request_id, error=error, is_final=True))
        self._end_if_done()

    def _pass_on(self, result: SequenceResult) -> None:
        self._last[result.sequence_index] = result
        if result.is_sequence_final:
            self._unfinished.discard(result.sequence_index)
        self._deliver(Response(self.request.request_id, result, is_final=self.is_done))

    def _deliver(self, response: Response) -> None:
        pass_on(response, self._on_response, self.request.log_extra)

    def _end_if_done(self) -> None:
        if self.is_done and self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()


def _task_id(command: AdapterCommand) -> dict[str, int]:
    return {} if command.task_id is None else {"task_id": command.task_id}


def _parts(error: Any) -> tuple[str, str]:
    """Return (message, status) of a tritonclient exception; "" for a part that it lacks."""
    return error.message() or "", (error.status() or "").removeprefix("StatusCode.")


def _as_text(text: str) -> NDArray[Any]:
    return np.array([[text.encode()]], np.object_)


def _input(name: str, array: NDArray[Any]) -> InferInput:
    tensor = InferInput(name, list(array.shape), INPUTS[name].dtype)
    tensor.set_data_from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  it has no types
    return tensor
