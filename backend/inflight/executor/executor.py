"""`Executor` of TensorRT-LLM's Executor API: enqueues requests, and returns their responses when they are awaited.

Each Executor has one engine (`engines.py`). The GptManager's loop makes responses, which wait in an
`EnqueuedRequests` until they are fetched. Any thread may call any method.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, cast, overload

from inflight.config import Parameters
from inflight.core.ports import EngineClient
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import OutputOptions
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.response import Response as CoreResponse
from inflight.core.request.stop import StopReason
from inflight.endpoint.delivery import Delivery
from inflight.errors import InflightError, InvalidArgument, Unavailable, Unsupported
from inflight.executor import engines, reports
from inflight.executor.arguments import (
    Lora,
    Timeout,
    adapters_of_prompts,
    constructor_arguments,
    id_argument,
    responses_arguments,
)
from inflight.executor.config import ExecutorConfig
from inflight.executor.convert import to_core_request, to_lora_request
from inflight.executor.debug_tensors import DebugTensorsPerIteration
from inflight.executor.enqueued import EnqueuedRequests
from inflight.executor.enums import BatchingType, ModelType
from inflight.executor.errors import ExecutorError, InvalidValue, in_fields
from inflight.executor.fields import FieldChecker
from inflight.executor.generate import Generating, Generation, Prompts, as_list, is_one_prompt
from inflight.executor.loading import OwnPostProcessors, has_client_id_argument, loader
from inflight.executor.parameters import to_parameters
from inflight.executor.request import Request
from inflight.executor.response import Response
from inflight.executor.results import Answers, EngineAnswer, ResponseOptions
from inflight.executor.sampling import OutputConfig, SamplingConfig
from inflight.executor_stats import (
    IterationStats,
    RequestStatsPerIteration,
    iteration_stats,
    request_stats,
)
from inflight.prompt import engine_streams
from inflight.receipts.writer import ReceiptWriter
from inflight.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request before it is enqueued.

    Attributes:
        request: The engine's request; None if the engine cannot serve it.
        error: Reason why the engine cannot serve the request; None if it can.
        answers: The request's answers.
        post_processor: `Request.logits_post_processor`.
    """

    request: CoreRequest | None
    error: InvalidArgument | Unsupported | None
    answers: Answers
    post_processor: Callable[..., Any] | None = None


class Executor:
    """In-flight batching over one model, which the constructor loads.

    An Executor is a context manager, which calls `shutdown` at its end. Otherwise it is shut down when it is
    garbage-collected, or when the interpreter ends.
    """

    @overload
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        model_type: ModelType = ...,
        executor_config: ExecutorConfig | None = ...,
        *,
        parameters: Parameters | None = ...,
        revision: str | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        encoder_model_path: str | os.PathLike[str],
        decoder_model_path: str | os.PathLike[str],
        model_type: ModelType,
        executor_config: ExecutorConfig,
    ) -> None: ...

    @overload
    def __init__(
        self,
        engine_buffer: bytes,
        json_config_str: str,
        model_type: ModelType,
        executor_config: ExecutorConfig,
        managed_weights: object = ...,
    ) -> None: ...

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Load a model and start to serve it.

        With several ranks, every process that mpirun started constructs an Executor. On a rank other than 0,
        the constructor returns when the rank's part of the model is loaded, and `shutdown` waits for rank
        0's shutdown.

        Args:
            *args: `model_path`, a folder in Hugging Face's format or a name on the hub, from which it is
                then downloaded; `model_type`, which must be DECODER_ONLY; and `executor_config`.
            **keywords: The same arguments by name; `parameters`, values that the configuration does not have,
                such as `Parameters(tensor_parallel_size=2)`; and `revision`, the branch, tag or commit to
                download.

        Raises:
            ExecutorError: The model cannot be loaded, for the given reason.
            NotSupported: The arguments are for encoders or engines in memory, or the configuration requires
                a feature that does not exist here.
        """
        path, config, base = constructor_arguments(args, keywords)
        self._fields = FieldChecker()
        self._fields.check(config)
        parameters = to_parameters(config, path, base)
        num_events = config.kv_cache_config.event_buffer_max_size
        parameters = replace(
            parameters, scheduler=replace(parameters.scheduler, kv_event_buffer_size=num_events)
        )
        self._own_post_processors = OwnPostProcessors()
        try:
            load = loader(config, self._own_post_processors, parameters.logits_post_processor_module)
            self._engine = engines.start(parameters, config.parallel_config, load)
        except ExecutorError:
            raise
        except InflightError as error:
            raise ExecutorError(str(error)) from error
        self._is_static = config.batching_type is BatchingType.STATIC
        self._max_queue_size = config.max_queue_size or 0
        self._num_slots = parameters.engine.max_num_sequences
        self._has_kv_events = num_events > 0
        self._enqueued = EnqueuedRequests()
        self._is_shut_down = False
        client = self._engine.client
        self._description = None if client is None else client.describe()
        self._tokenizer: Tokenizer | None = None
        self._finalizer = weakref.finalize(self, _end, self._enqueued, self._engine)

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Cancel requests in flight, wake waiting threads, and end the engine. Idempotent.

        On a rank that takes no requests, this waits until rank 0 has ended.
        """
        self._is_shut_down = True
        self._finalizer()

    def can_enqueue_requests(self) -> bool:
        """Return whether this process takes requests and is not shut down."""
        return not self._is_shut_down and self._engine.client is not None

    # ---------------------------------------------------------------- requests

    def enqueue_request(self, request: Request) -> int:
        """Queue a request and return its id; see `enqueue_requests`."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Iterable[Request]) -> list[int]:
        """Queue all requests. If this raises, none of them runs.

        A request that the engine cannot serve gets a response with an error.

        Returns:
            The request ids, in the order of the requests.

        Raises:
            ExecutorError: The executor is shut down, takes no requests on this rank, or has `max_queue_size`
                sequences waiting.
            NotSupported: A request requires a feature that does not exist here.
        """
        client = self._client("Shutdown called, cannot enqueue requests")
        if not isinstance(requests, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance] - from callers
            raise TypeError(f"enqueue_requests: expected a list of Requests, got {requests!r:.100}")
        prepared = [self._prepare(request) for request in requests]
        self._reserve(sum(each.answers.num_sequences for each in prepared))
        handles: list[RequestHandle] = []
        for each in prepared:
            try:
                handle = self._submit(client, each, self._enqueued.put)
            except ExecutorError:
                for left in prepared[len(handles) + 1 :]:
                    self._enqueued.release(left.answers.num_sequences)
                for taken in handles:
                    taken.stop()
                raise
            self._enqueued.open(handle.request_id, each.answers)
            handles.append(handle)
        return [handle.request_id for handle in handles]

    async def stream(self, request: Request, *, lora: str | None = None) -> AsyncIterator[Response]:
        """Enqueue a request and yield its responses as tokens are generated; `streaming` need not be set.

        The adapter is `request.lora_config`, or `lora`, the name of an adapter in the parameters. Closing
        the iterator early, or cancelling its task, cancels the request. `await_responses` does not return
        these responses.

        Raises:
            ExecutorError: As for `enqueue_requests`.
        """
        client = self._client("Shutdown called, cannot enqueue requests")
        request = copy.copy(request)
        request.streaming = True
        prepared = self._prepare(request)
        if lora is not None and prepared.request is not None:
            if request.lora_config is not None:
                raise InvalidValue(f"lora is {lora!r} and the request has a lora_config: give one of them")
            prepared = replace(prepared, request=replace(prepared.request, lora=to_lora_request(lora)))
        loop = asyncio.get_running_loop()
        has_news = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(has_news.set)

        delivery: Delivery[EngineAnswer] = Delivery(merges=False, on_news=notify)
        self._reserve(prepared.answers.num_sequences)
        handle = self._submit(client, prepared, delivery.put)
        is_final = False
        try:
            while not is_final:
                await has_news.wait()
                has_news.clear()
                for answer in delivery.take(timeout_s=0):
                    is_final = answer.is_final
                    yield answer.to_response()
        finally:
            if not is_final:
                handle.stop()

    def generate(
        self,
        prompts: Prompts,
        max_tokens: int = 16,
        *,
        sampling_config: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        end_id: int | None = None,
        lora: Lora | Sequence[Lora | None] | None = None,
        return_log_probs: bool = False,
        return_receipt: bool = False,
        progress: bool | None = None,
    ) -> Generation | list[Generation]:
        """Generate text for one prompt or several; return when all have ended.

        Args:
            prompts: A text, token ids, or a list of either.
            max_tokens: Largest number of tokens to generate for each sequence.
            sampling_config: Sampling controls; None: greedy.
            stop: Stop strings, which are not part of an output's text.
            end_id: Token id that ends an output; None: the checkpoint's end ids; -1: none.
            lora: One adapter for all prompts, or a list with an adapter for each; None: the model without
                adapter.
            return_log_probs: Whether to return `cum_log_prob` of each sequence.
            return_receipt: Whether to return the receipt of each prompt.
            progress: Whether to show a progress bar on stderr; None: show it if stderr is a terminal and the
                call is long.

        Returns:
            A Generation for one prompt; a list of Generations for a list of prompts.

        Raises:
            ExecutorError: A prompt cannot be served, or the executor is shut down. The other prompts are
                cancelled.
        """
        client = self._client("Shutdown called, cannot enqueue requests")
        listed = as_list(prompts)
        is_text = any(isinstance(prompt, str) for prompt in listed)
        tokenizer = self._find_tokenizer(is_required=is_text or bool(stop))
        adapters = adapters_of_prompts(lora, len(listed))
        sampling = sampling_config or SamplingConfig()
        output = OutputConfig(return_log_probs, exclude_input_from_output=True, return_receipt=return_receipt)
        converted: list[CoreRequest] = []
        for prompt, adapter in zip(listed, adapters, strict=True):
            ids = tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else prompt
            request = Request(
                list(cast("Sequence[int]", ids)),
                max_tokens,
                sampling_config=sampling,
                output_config=output,
                end_id=end_id,
            )
            try:
                converted.append(self._to_generated(request, adapter, tuple(stop)))
            except InvalidArgument as error:
                raise ExecutorError(f"prompt {len(converted)}: {error}") from error
        most_at_once = self._num_slots + self._max_queue_size if self._max_queue_size else None
        generated = Generating(client, converted, stop, tokenizer).run(most_at_once, progress)
        return generated[0] if is_one_prompt(prompts) else generated

    def cancel_request(self, id: int) -> None:
        """Cancel a request. Its last response has the tokens so far, and the finish reason CANCELLED.

        Ignores ids of requests that have ended or were not enqueued.
        """
        self._client().stop(id_argument("cancel_request", id), StopReason.CANCELLED)

    # ---------------------------------------------------------------- responses

    @overload
    def await_responses(self, timeout: timedelta | None = ...) -> list[Response]: ...

    @overload
    def await_responses(self, id: int, timeout: Timeout = ...) -> list[Response]: ...

    @overload
    def await_responses(self, ids: Sequence[int], timeout: Timeout = ...) -> list[list[Response]]: ...

    def await_responses(self, *args: Any, **keywords: Any) -> list[Response] | list[list[Response]]:
        """Wait for responses and return them.

        Args:
            *args: A request id, a list of ids, or no id for all requests; then a timeout, as a timedelta or
                in seconds. Without a timeout, this waits until there is a response; with a list of ids,
                until each of these requests has one. The timeout is for all requests together.
            **keywords: The same arguments by name: `id`, `ids`, `timeout`.

        Returns:
            The responses, oldest first; for a list of ids, a list of responses for each request. Empty after
            the timeout or a shutdown. For a request whose final response was already fetched, a response
            with an error.
        """
        self._client()
        asked, timeout = responses_arguments(args, keywords)
        timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if asked is None:
            return [answer.to_response() for answer in self._enqueued.take(timeout_s)]
        if isinstance(asked, int):
            return self._responses_of(asked, timeout_s)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        return [
            self._responses_of(each, None if end_s is None else max(0.0, end_s - time.monotonic()))
            for each in asked
        ]

    def _responses_of(self, request_id: int, timeout_s: float | None) -> list[Response]:
        if self._enqueued.is_ended(request_id):
            text = f"ReqId {request_id} has already been processed and was terminated."
            return [Response(request_id, text)]
        return [answer.to_response() for answer in self._enqueued.take(timeout_s, request_id)]

    def get_num_responses_ready(self, id: int | None = None) -> int:
        """Return the number of responses ready to be fetched, for one request or for all."""
        self._client()
        return self._enqueued.count(None if id is None else id_argument("get_num_responses_ready", id))

    # ---------------------------------------------------------------- reports

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return statistics of iterations since the last call, oldest first.

        Only the statistics of the last `iter_stats_max_iterations` iterations are kept.
        """
        told = self._reports(ReportKind.ITERATIONS)
        return [iteration_stats(each, told.memory) for each in told.iterations]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return statistics of requests in iterations since the last call, oldest first.

        Only the statistics of the last `request_stats_max_iterations` iterations are kept.
        """
        return [request_stats(each) for each in self._reports(ReportKind.REQUESTS).requests]

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """Return debug tensors of iterations since the last call, oldest first, as set in `debug_config`."""
        self._client()
        return [reports.debug_tensors(each) for each in self._engine.latest_debug_tensors()]

    def get_kv_cache_event_manager(self) -> reports.KVCacheEventManager | None:
        """Return the source of KV cache events; None if `event_buffer_max_size` is 0."""
        client = self._client()
        if not self._has_kv_events:
            return None
        return reports.KVCacheEventManager(client.reports, self._described().limits.max_sequence_length)

    def _reports(self, kind: ReportKind) -> Reports:
        try:
            return self._client().reports(kind, 0.0)
        except Unavailable as error:
            raise ExecutorError(str(error)) from error

    # ---------------------------------------------------------------- helpers

    def _client(self, shut_down: str = "Shutdown called") -> EngineClient:
        if self._is_shut_down:
            raise ExecutorError(shut_down)
        if self._engine.client is None:
            raise ExecutorError(
                "this rank takes no requests: enqueue them on the rank whose can_enqueue_requests() is true"
            )
        return self._engine.client

    def _described(self) -> EngineDescription:
        assert self._description is not None, "only called on a rank with a client, which has a description"
        return self._description

    def _find_tokenizer(self, is_required: bool) -> Tokenizer | None:
        folder = self._described().tokenizer_dir
        if self._tokenizer is None and folder:
            self._tokenizer = Tokenizer.from_dir(folder)
        if self._tokenizer is None and is_required:
            raise ExecutorError("the checkpoint has no tokenizer.json: prompts have to be token ids")
        return self._tokenizer

    def _prepare(self, request: Request) -> _Prepared:
        if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance] - from callers
            raise TypeError(f"enqueue_request: expected a Request, got {request!r:.100}")
        self._fields.check(request)
        if request.logits_post_processor is not None:
            has_client_id_argument(request.logits_post_processor)
        limits = self._described().limits
        try:
            converted = to_core_request(request, limits)
        except (InvalidArgument, Unsupported) as error:
            nothing = ResponseOptions(False, False, 0, 0, request.client_id, OutputOptions())
            return _Prepared(None, error, Answers(nothing, 1))
        if self._is_static and converted.streaming:  # as in TensorRT-LLM
            whole = replace(converted.output, exclude_input_from_output=True)
            converted = replace(converted, streaming=False, output=whole)
        repeats = request.return_all_generated_tokens
        if converted.streaming and converted.sampling.uses_beams and not repeats:
            _log.warning("the beams of a stream change: every response has all generated tokens")
            repeats = True
        asked = ResponseOptions(
            converted.streaming,
            repeats,
            request.max_tokens,
            limits.vocab_size,
            request.client_id,
            converted.output,
            limits.tokens_per_block,
        )
        receipt = ReceiptWriter(converted) if converted.output.return_receipt else None
        answers = Answers(asked, converted.sampling.num_sequences, receipt)
        return _Prepared(converted, None, answers, request.logits_post_processor)

    def _to_generated(self, request: Request, lora: LoraRequest | None, stop: tuple[str, ...]) -> CoreRequest:
        """Convert one prompt's request of `generate` to the engine's request."""
        described = self._described()
        core = to_core_request(request, described.limits)
        return replace(
            core,
            lora=lora,
            streaming=engine_streams(False, stop, core.sampling.uses_beams),
            end_ids=core.end_ids or (described.eos_token_ids if request.end_id is None else ()),
        )

    def _reserve(self, num_sequences: int) -> None:
        bound = self._max_queue_size
        if not self._enqueued.reserve(num_sequences, bound + self._num_slots if bound else None):
            raise ExecutorError(f"Maximum queue size of {bound} has been reached, please try again later")

    def _submit(
        self, client: EngineClient, prepared: _Prepared, on_answer: Callable[[EngineAnswer], None]
    ) -> RequestHandle:
        """Submit a request counted by `_reserve`; if it is invalid, deliver its error through `on_answer`.

        Returns the request's handle. Raises ExecutorError if the engine does not accept the request, which
        is then no longer counted.
        """
        answers, enqueued, own = prepared.answers, self._enqueued, self._own_post_processors
        core, post_processor = prepared.request, prepared.post_processor

        def on_response(response: CoreResponse) -> None:
            if response.is_final:
                enqueued.release(answers.num_sequences)
                if post_processor is not None:
                    own.forget(response.request_id)
            on_answer(answers.add(response))

        try:
            if core is not None and post_processor is not None:
                return own.submit(post_processor, lambda: client.submit(core, on_response))
            if core is not None:
                return client.submit(core, on_response)
        except InflightError as error:
            enqueued.release(answers.num_sequences)
            raise ExecutorError(str(in_fields(error))) from error
        request_id = client.reserve_id()
        on_response(CoreResponse(request_id, error=prepared.error, is_final=True))
        return RequestHandle(request_id, client.stop)


def _end(enqueued: EnqueuedRequests, engine: engines.ExecutorEngine) -> None:
    enqueued.close()
    engine.close()
