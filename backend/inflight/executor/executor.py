"""`Executor`: takes requests, and hands out their responses to whoever asks for them.

One object has one engine (`engines.py`): the GptManager's loop turns requests into responses, which wait in a mailbox
until a client fetches them. Any thread may call any method. Specification: the Executor API of TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from inflight.build import LoadModel, load_model
from inflight.config import Parameters
from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.request import EngineDescription
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.response import Response as CoreResponse
from inflight.core.request.stop import StopReason
from inflight.errors import InflightError, InvalidArgument
from inflight.executor import engines, reports
from inflight.executor.config import ExecutorConfig
from inflight.executor.convert import to_core_request, to_parameters
from inflight.executor.enums import BatchingType, ModelType
from inflight.executor.errors import ExecutorError, InvalidValue, NotSupported
from inflight.executor.generate import Generating, Generation, Prompts, as_list
from inflight.executor.mailbox import Mailbox
from inflight.executor.request import Request
from inflight.executor.response import Response
from inflight.executor.results import Answers, Asked
from inflight.executor.sampling import OutputConfig, SamplingConfig
from inflight.executor.stats import DebugTensorsPerIteration, IterationStats, RequestStatsPerIteration
from inflight.file_names import native
from inflight.text import Tokenizer

Timeout = timedelta | float | None
"""How long to wait: a timedelta, or seconds; None: as long as it takes."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that is about to be enqueued.

    Attributes:
        request: For the engine; None if it cannot be served.
        error: Then, why not.
        answers: Its answers.
    """

    request: CoreRequest | None
    error: InvalidArgument | None
    answers: Answers


class Executor:
    """In-flight batching over one model, from construction, which takes as long as the model takes to load.

    As a context manager it is shut down at the end; else when nobody has it any more, or the interpreter ends.
    """

    @overload
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        model_type: ModelType = ...,
        executor_config: ExecutorConfig | None = ...,
        *,
        parameters: Parameters | None = ...,
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

        With several ranks, all that mpirun has started construct an Executor; the constructor of a rank other than
        0 returns when the model is loaded, and its `shutdown` waits for rank 0's.

        Args:
            *args: The checkpoint folder, as Hugging Face has it; the type, DECODER_ONLY; the configuration.
            **keywords: The same by name, and `parameters`: what the engine is loaded with beside what the
                configuration says, such as `Parameters(tensor_parallel_size=2)`.

        Raises:
            ExecutorError: The model cannot be loaded; the message says why.
            NotSupported: It is one of the forms for encoders or engines in memory, or the configuration asks for
                something that is not built.
        """
        path, config, base = _constructor_arguments(args, keywords)
        if not Path(native(path), "config.json").is_file():
            raise ExecutorError(f"File does not exist: {path}/config.json")
        parameters = to_parameters(config, path, base)
        num_events = config.kv_cache_config.event_buffer_max_size
        parameters = replace(
            parameters, scheduler=replace(parameters.scheduler, kv_event_buffer_size=num_events)
        )
        try:
            self._engine = engines.start(parameters, config.parallel_config, _loader(config))
        except ExecutorError:
            raise
        except InflightError as error:
            raise ExecutorError(str(error)) from error
        self._is_static = config.batching_type is BatchingType.STATIC
        self._max_queue_size = config.max_queue_size or 0
        self._num_slots = parameters.engine.max_num_sequences
        self._has_kv_events = num_events > 0
        self._mailbox = Mailbox()
        self._is_shut_down = False
        client = self._engine.client
        self._description = None if client is None else client.describe()
        self._tokenizer: Tokenizer | None = None
        self._finalizer = weakref.finalize(self, _end, self._mailbox, self._engine)

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Cancel what is in flight, wake whoever waits for responses, and end the engine. Idempotent.

        On a rank that takes no requests this waits for the end of the one that does.
        """
        self._is_shut_down = True
        self._finalizer()

    def can_enqueue_requests(self) -> bool:
        """Whether this is the process that takes requests, and it is not shut down."""
        return not self._is_shut_down and self._engine.client is not None

    # ---------------------------------------------------------------- requests

    def enqueue_request(self, request: Request) -> int:
        """Queue a request and return the id of its responses; as `enqueue_requests`."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Iterable[Request]) -> list[int]:
        """Queue requests: all, or none if this raises.

        A request that the engine cannot serve gets a response with an error.

        Returns:
            For each request the id that its responses will have.

        Raises:
            ExecutorError: The executor is shut down, takes no requests on this rank, or has `max_queue_size`
                sequences waiting.
            NotSupported: A request asks for something that is not built.
        """
        client = self._client("Shutdown called, cannot enqueue requests")
        prepared = [self._prepare(request) for request in requests]
        self._announce(sum(each.answers.num_sequences for each in prepared))
        ids: list[int] = []
        for each in prepared:
            try:
                request_id = self._submit(client, each)
            except InflightError as error:
                for left in prepared[len(ids) :]:
                    self._mailbox.retract(left.answers.num_sequences)
                raise ExecutorError(str(error)) from error
            self._mailbox.open(request_id, each.answers)
            ids.append(request_id)
        return ids

    def _prepare(self, request: Request) -> _Prepared:
        description = self._described()
        output, num_sequences = request.output_config, request.sampling_config.num_return_sequences or 1
        uses_beams = request.sampling_config.beam_width > 1
        streaming = request.streaming and not self._is_static
        try:
            converted = to_core_request(request, description.limits)
        except InvalidArgument as error:
            asked = Asked(streaming, False, request.max_tokens, 0, request.client_id, _core_output(output))
            return _Prepared(None, error, Answers(asked, 1))
        if self._is_static and request.streaming:  # as in TensorRT-LLM
            excluded = replace(converted.output, exclude_input_from_output=True)
            converted = replace(converted, streaming=False, output=excluded)
        asked = Asked(
            streaming,
            request.return_all_generated_tokens or uses_beams,
            request.max_tokens,
            description.limits.vocab_size,
            request.client_id,
            converted.output,
        )
        return _Prepared(converted, None, Answers(asked, 1 if uses_beams else num_sequences))
