"""A serving model between Triton and an engine client: admits requests, and shuts down in order.

Owns the threads of one model instance that send responses, detect cancellations, and convert requests with long
texts or pictures. Does not know where the engine runs. `execute` runs on Triton's thread, never blocks and never
raises. An invalid request is answered with an error and does not affect other requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from inflight.access_log import AccessLog, random_id
from inflight.core.ports import EngineClient
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import Origin, Request
from inflight.errors import InflightError, Name, Unsupported, unexpected
from inflight.log_lines import REQUEST_ID
from inflight.prompt import Prompt
from inflight.serving.client_lanes import ClientLanes
from inflight.serving.completion_text import TokenizerFinder
from inflight.serving.in_flight import ClientStream, Ending, InFlight, InFlightRequest, error_of_ending
from inflight.serving.reply import NewText, Repetition, Reply, new_text
from inflight.serving.response_size import ResponseBudget
from inflight.serving.sender import Sender
from inflight.tensors.input_table import INPUTS
from inflight.tensors.lora import read_adapter_command
from inflight.tensors.pictures import BlockingEncoder
from inflight.tensors.reader import TensorReader
from inflight.tensors.request_kind import RequestKind, request_kind
from inflight.tensors.request_parameters import RequestParameters, error_writer, read_request_parameters
from inflight.tensors.requests import (
    ServingContext,
    check_texts,
    client_id,
    convert,
    must_encode_pictures,
    tokenizing_cost,
)
from inflight.tensors.spec import Vocabulary
from inflight.tensors.wanted_outputs import Naming
from inflight.text.text_encoder import TextEncoder
from inflight.triton.adapter_requests import AdapterRequests
from inflight.triton.cancellation import CancellationWatcher
from inflight.triton.host import ModelArgs, logged_id
from inflight.triton.input_arrays import input_arrays
from inflight.triton.pictures import PICTURE_THREADS, ServerPictures
from inflight.triton.responses import ResponseBuilder, TritonStream

_log = logging.getLogger(__name__)

_MAX_INLINE = 4096
"""Largest text in bytes that `execute` itself tokenizes, in about two milliseconds."""

_TOKENIZING_THREADS = 2

_STATE_TIMEOUT_S = 5.0
"""Seconds to wait for the loop's state; after that, state requests are answered with where the loop hangs."""


class FrontEnd:
    """A serving model, for an engine in this or another process.

    Triton calls it on one thread; `flush` may be called on any.

    Args:
        pb_utils: The `triton_python_backend_utils` module, or a fake of it.
        client: Client of the engine.
        close_client: Closes the client, or the engine too. It must answer all requests in flight before it
            returns.
        model: Contents of the model's config.pbtxt.
        tokenizers: Source of the tokenizer.
        vocabulary: Tensor names that clients use.
        pictures: Encoder of pictures; None: the server's process.
    """

    def __init__(
        self,
        pb_utils: Any,
        client: EngineClient,
        close_client: Callable[[], None],
        model: ModelArgs,
        tokenizers: TokenizerFinder,
        vocabulary: Vocabulary = Vocabulary.TOKENS,
        pictures: BlockingEncoder | None = None,
    ) -> None:
        self._pb_utils = pb_utils
        self._pictures = pictures
        self._client = client
        self._close_client = close_client
        self._model = model
        self._vocabulary = vocabulary
        self._tokenizers = tokenizers
        self._responses = ResponseBuilder(pb_utils, model.outputs, model.is_batched)
        self._in_flight = InFlight(client)
        self._access_log = AccessLog()
        self._budget = ResponseBudget()
        self._sender = Sender(
            self._in_flight, self._responses, self._budget, model.parameters.stream_interval
        )
        client.add_outbox(self._sender.wait_until_sent)
        self._lanes = ClientLanes(_TOKENIZING_THREADS, PICTURE_THREADS)
        self._repetition = Repetition(
            model.parameters.repeat_log_probs,
            model.parameters.max_repeated_logits_bytes,
            model.parameters.accumulate_tokens,
        )
        self._states = _StateRequests(client, self._responses)
        self._adapters = AdapterRequests(client, self._responses)
        self._watcher = CancellationWatcher(
            self._in_flight, model.parameters.cancellation_check_period_ms / 1000
        )

    def execute(self, requests: Iterable[Any]) -> None:
        """Admit or refuse Triton's requests. Each request gets a final response, now or later."""
        for request in requests:
            origin = self._origin(request)
            REQUEST_ID.set(origin.request_id)
            stream = TritonStream(
                request.get_response_sender(),
                self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                partial(self._responses.error, write=error_writer(request.parameters())),
            )
            try:
                self._admit(request, stream, origin)
            except InflightError as error:
                self._refuse(stream, origin, error)
            except Exception as error:  # a bug that affects one request must not end the others
                _log.error("execute: %r", error)
                self._refuse(stream, origin, unexpected("the front end failed", error))
        REQUEST_ID.set("")

    def close(self) -> None:
        """Answer all requests in flight, then release the client and the threads. Idempotent."""
        for entry in self._in_flight.stop_admitting():
            self._in_flight.cancel(entry, Ending.UNLOAD)
        self._watcher.close()
        self._close_client()
        self._states.close()
        self._adapters.close()
        self._sender.close()
        # What is still in flight: requests that are being tokenized, and requests to which the engine client
        # has sent no final response.
        for entry in self._in_flight.stop_admitting():
            self._refuse(
                entry.stream, None if entry.handles else entry.origin, error_of_ending(Ending.UNLOAD)
            )
            self._budget.release(entry.ticket)
        self._lanes.close()
        self._access_log.close()

    def flush(self, timeout_s: float) -> None:
        """Send waiting responses to Triton, for at most `timeout_s` seconds, and send none afterwards.

        Any thread.
        """
        flushing = threading.Thread(target=self._sender.close, name="inflight-flush", daemon=True)
        flushing.start()
        flushing.join(timeout_s)

    def _origin(self, triton_request: Any) -> Origin:
        """Return where a request comes from. Triton does not tell its models the client's address."""
        request_id = logged_id(triton_request) or random_id()
        return Origin("triton", request_id, self._model.name, received_ns=time.monotonic_ns())

    def _admit(self, triton_request: Any, stream: TritonStream, origin: Origin) -> None:
        parameters = read_request_parameters(
            triton_request.parameters(),
            triton_request.timeout(),
            self._vocabulary,
            self._model.parameters.ignored_request_parameters,
        )
        origin = replace(origin, traceparent=parameters.traceparent)
        rows = TensorReader(input_arrays(triton_request), INPUTS, self._vocabulary).rows()
        kind = request_kind(rows)
        if kind is RequestKind.STOP:
            self._in_flight.stop(triton_request.request_id())
            stream.finish(self._responses.empty())
            return
        description = self._client.describe()
        if kind is RequestKind.STATE:
            self._ask_state(description, stream)
            return
        if kind is RequestKind.ADAPTERS:
            self._command_adapters(description, rows, stream)
            return
        reply = Reply((), not self._model.decoupled)
        entry = InFlightRequest(triton_request.request_id(), stream, reply, rows[0].client_names(), origin)
        context = self._context(description, triton_request, parameters, entry)
        check_texts(rows, context.encoder, description.limits)
        if not self._must_wait(rows, parameters):
            self._start(entry, rows, context)
            return
        detached = [row.detached() for row in rows]
        lane, later = client_id(rows, parameters), partial(self._start, entry, detached, context)
        self._in_flight.register(entry)
        self._lanes.submit(lane, partial(self._start_later, entry, later), must_encode_pictures(rows))

    def _must_wait(self, rows: Sequence[TensorReader], parameters: RequestParameters) -> bool:
        """Return whether a request waits for its own texts and pictures, or earlier ones of its client."""
        if tokenizing_cost(rows) > _MAX_INLINE or must_encode_pictures(rows):
            return True
        return not self._lanes.are_idle and self._lanes.is_busy(client_id(rows, parameters))

    def _start_later(self, entry: InFlightRequest, start: Callable[[], None]) -> None:
        """Start a request that is already registered. Runs on a thread of the client lanes."""
        REQUEST_ID.set("" if entry.origin is None else entry.origin.request_id)
        try:
            if entry.ending is Ending.NONE:
                start()
                return
            error = error_of_ending(entry.ending)
        except InflightError as raised:
            error = raised
        except Exception as raised:  # a bug must not end the thread, which runs other requests' jobs
            _log.error("a request could not be started: %r", raised)
            error = unexpected("the front end failed", raised)
        self._in_flight.withdraw(entry)
        self._refuse(entry.stream, entry.origin, error)

    def _start(self, entry: InFlightRequest, rows: Sequence[TensorReader], context: ServingContext) -> None:
        """Encode the request's contents and submit it to the engine. If this raises, nothing was submitted."""
        prompts = convert(rows, context)
        in_one = not self._model.decoupled
        requests = [_with_origin(prompt.request, entry.origin) for prompt in prompts]
        # The engine owns adapters' weights from here on. A reply must not keep them for as long as its
        # request lives.
        kept = [replace(prompt, request=prompt.request.without_weights()) for prompt in prompts]
        with_texts = [(prompt, self._new_text(prompt, context)) for prompt in kept]
        entry.reply = Reply(with_texts, in_one, self._repetition)
        # Prompts of one batch may differ in `streaming`. A response that is not streamed is larger.
        streaming = all(prompt.options.streaming for prompt in prompts)
        limits = context.description.limits
        entry.ticket = self._budget.reserve(
            requests, limits.vocab_size, streaming, in_one, limits.additional_outputs
        )
        try:
            self._in_flight.start(entry, requests, self._sender.put)
        except Exception:  # any error is raised again after its memory is released
            self._budget.release(entry.ticket)
            raise

    def _ask_state(self, description: EngineDescription, stream: TritonStream) -> None:
        if not description.state_enabled:
            raise Unsupported(
                "state is true, but this server does not report its state: parameter enable_state_requests of the "
                "model that holds the engine is false"
            )
        self._states.ask(stream)

    def _command_adapters(
        self, description: EngineDescription, rows: Sequence[TensorReader], stream: TritonStream
    ) -> None:
        if not description.adapter_commands_enabled:
            raise Unsupported(
                Name("lora_command"),
                " is not available: parameter enable_adapter_commands of the model that holds the engine is false",
            )
        self._adapters.ask(stream, read_adapter_command(rows))

    def _context(
        self,
        description: EngineDescription,
        triton_request: Any,
        parameters: RequestParameters,
        entry: InFlightRequest,
    ) -> ServingContext:
        model, exclude = self._model, self._model.parameters.exclude_input_in_output
        requested = frozenset(triton_request.requested_output_names())
        return ServingContext(
            description=description,
            decoupled=model.decoupled,
            exclude_input_in_output=description.exclude_input_from_output if exclude is None else exclude,
            naming=Naming.from_triton(requested, self._vocabulary, model.outputs),
            encoder=TextEncoder(
                partial(self._tokenizers.require, description.tokenizer_dir),
                model.parameters.add_special_tokens,
            ),
            parameters=parameters,
            has_draft_model=model.parameters.tensorrt_llm_draft_model_name is not None,
            skip_special_tokens=model.parameters.skip_special_tokens,
            pictures=self._pictures or ServerPictures(lambda: entry.ending is not Ending.NONE),
        )

    def _new_text(self, prompt: Prompt, context: ServingContext) -> NewText | None:
        options = prompt.options
        if "text_output" not in options.outputs and not options.stop_strings:
            return None
        needed = context.naming.named or options.stop_strings
        find = self._tokenizers.require if needed else self._tokenizers.find
        tokenizer = find(context.description.tokenizer_dir)
        if tokenizer is None:
            return None
        return new_text(prompt, tokenizer)

    def _refuse(self, stream: ClientStream, origin: Origin | None, error: InflightError) -> None:
        """Answer a request with an error. With an origin, it gets its line in the access log here."""
        self._access_log.refuse(origin, code=error.code)
        try:
            stream.fail(error)
        except Exception as failure:  # Triton may raise anything, and this client can no longer be answered
            _log.debug("a refusal could not be sent: %r", failure)


def _with_origin(request: Request, origin: Origin | None) -> Request:
    """Return a request with its origin, in which `client_id` takes the place of the client's address."""
    if origin is not None and request.client_id:
        origin = replace(origin, client=str(request.client_id))
    return replace(request, origin=origin)


class _StateRequests:
    """Answers state requests on its own thread, because reading the state can take as long as an iteration.

    Requests that arrive while the state is being read are all answered with the next reading.
    """

    def __init__(self, client: EngineClient, responses: ResponseBuilder) -> None:
        self._client = client
        self._responses = responses
        self._waiting: deque[TritonStream] = deque()
        self._thread = ThreadPoolExecutor(1, "inflight-state")

    def ask(self, stream: TritonStream) -> None:
        """Queue a request for the state, which is answered on `stream`. Never blocks."""
        self._waiting.append(stream)
        # In the caller's context, so that log lines name the request, or the first of several.
        self._thread.submit(copy_context().run, self._answer)

    def close(self) -> None:
        """Answer all queued requests and end the thread, quickly if the client is closed. Idempotent."""
        self._thread.shutdown()

    def _answer(self) -> None:
        streams = [self._waiting.popleft() for _ in range(len(self._waiting))]
        answer = self._read() if streams else ""
        for stream in streams:
            try:
                # Each stream gets its own response: Triton owns a response once it is sent.
                if isinstance(answer, InflightError):
                    stream.fail(answer)
                else:
                    stream.finish(self._responses.text("state", answer))
            except Exception as error:  # Triton may raise anything; other streams still need an answer
                _log.debug("the state could not be sent: %r", error)

    def _read(self) -> str | InflightError:
        try:
            return self._client.state(_STATE_TIMEOUT_S)
        except InflightError as error:
            return error
        except Exception as error:  # a bug; the clients still need an answer
            _log.exception("the state could not be read")
            return unexpected("the state could not be read", error)
