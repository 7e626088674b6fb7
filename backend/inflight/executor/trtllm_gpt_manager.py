"""GptManager with the signature that TensorRT-LLM documents: it takes a model's path and callbacks for tensors.

It loads the engine, runs `inflight.batch_manager.GptManager` on it, converts tensors to requests and results
to tensors, and calls GetInferenceRequests even while nothing runs. It runs on one rank only, unlike the
Executor and the server. Specifications: The Batch Manager, Inference Request.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from inflight.batch_manager import GptManager as CoreGptManager
from inflight.build import check_parameters
from inflight.config import Parameters
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopSignal
from inflight.core.scheduler import Scheduler
from inflight.engine_parts import make_adapters, make_block_store, saves_blocks
from inflight.errors import AlreadyExists, InflightError
from inflight.executor.config import (
    DecodingConfig,
    ExecutorConfig,
    KvCacheConfig,
    ParallelConfig,
    SchedulerConfig,
)
from inflight.executor.convert import to_host_array
from inflight.executor.enums import BatchingType, CapacitySchedulerPolicy, DecodingMode
from inflight.executor.fields import FieldChecker
from inflight.executor.parameters import to_parameters
from inflight.executor.typed import Typed
from inflight.load_model import LoadModel, load_model
from inflight.prompt import Output, Prompt
from inflight.tensors.inference_request import InferenceRequest
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_arrays import make_array
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.spec import Vocabulary

if TYPE_CHECKING:
    import torch

_POLL_S = 0.005
"""Interval in seconds at which an idle manager calls GetInferenceRequests."""

_WITHOUT_BATCH = frozenset({"output_ids", "sequence_length"})
"""Outputs that have no leading dimension of 1 in the specification."""


class TrtGptModelType(Enum):
    """Kinds of batching. V1 ends a batch before it starts the next; the other two both mean in-flight batching."""

    V1 = "V1"
    InflightBatching = "inflight_batching"
    InflightFusedBatching = "inflight_fused_batching"


class SchedulerPolicy(Enum):
    """Policies for which sequences may hold KV blocks."""

    MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
    GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


@dataclass
class TrtGptModelOptionalParams(Typed):
    """Optional settings of a model. Fields that ExecutorConfig and its parts also have mean the same as there.

    Attributes:
        max_num_sequences: Largest number of sequences that run at a time.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    device_ids: list[int] | None = None
    normalize_log_probs: bool = True
    enable_chunked_context: bool = False
    decoding_mode: DecodingMode | None = None
    max_num_sequences: int | None = None


@dataclass(frozen=True)
class NamedTensor:
    """An output tensor with its name."""

    tensor: torch.Tensor
    name: str


GetInferenceRequestsCallback = Callable[[int], Iterable[InferenceRequest]]
"""Callback that returns new requests. Its argument is how many at most; a negative number means no limit.

The requests' tensors may be torch tensors or numpy arrays.
"""

SendResponseCallback = Callable[[int, list[NamedTensor], bool, str], None]
"""Callback with (request id, outputs, whether this is the request's last response, error message or "")."""

PollStopSignalCallback = Callable[[], AbstractSet[int]]
"""Callback that returns the ids of requests to stop. Ids of requests that are not in flight are ignored."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""Callback with the statistics of an iteration as a JSON string."""


@dataclass(frozen=True)
class _Arguments:
    """The constructor's arguments after the first four."""

    get_inference_requests_cb: GetInferenceRequestsCallback
    send_response_cb: SendResponseCallback
    poll_stop_signal_cb: PollStopSignalCallback | None = None
    return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None
    optional_params: TrtGptModelOptionalParams | None = None
    terminate_req_id: int | None = None
    _: KW_ONLY
    max_num_requests: int = -1
    load: LoadModel = load_model


class GptManager:
    """In-flight batching over one model, from construction until `shutdown` or garbage collection.

    The worker thread calls the callbacks, which must not block: no sequence advances while a callback runs.

    Args:
        trt_engine_path: Folder of the checkpoint.
        model_type: Kind of batching.
        max_beam_width: Largest number of beams of a beam search.
        scheduler_policy: Rule for which sequences may hold KV blocks.
        max_num_requests: Largest number of active requests; optional, because later versions do not have it.
        get_inference_requests_cb: Called at the start of every iteration.
        send_response_cb: Called with each response, exactly one of which is final for each request.
        poll_stop_signal_cb: Called at the end of every iteration.
        return_batch_manager_stats_cb: Called at the end of every iteration that had active requests.
        optional_params: Optional settings.
        terminate_req_id: A request with this id ends the manager like `shutdown`, and is not answered.
        load: Function that loads the model; keyword only.

    Raises:
        ConfigError: The model cannot be loaded, for the given reason.
        NotSupported: An optional parameter requires a feature that does not exist here.
    """

    @overload
    def __init__(
        self,
        trt_engine_path: str | PathLike[str],
        model_type: TrtGptModelType,
        max_beam_width: int,
        scheduler_policy: SchedulerPolicy,
        max_num_requests: int,
        get_inference_requests_cb: GetInferenceRequestsCallback,
        send_response_cb: SendResponseCallback,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
        *,
        load: LoadModel = load_model,
    ) -> None: ...

    @overload
    def __init__(
        self,
        trt_engine_path: str | PathLike[str],
        model_type: TrtGptModelType,
        max_beam_width: int,
        scheduler_policy: SchedulerPolicy,
        get_inference_requests_cb: GetInferenceRequestsCallback,
        send_response_cb: SendResponseCallback,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
        *,
        max_num_requests: int = -1,
        load: LoadModel = load_model,
    ) -> None: ...

    def __init__(
        self,
        trt_engine_path: str | PathLike[str],
        model_type: TrtGptModelType,
        max_beam_width: int,
        scheduler_policy: SchedulerPolicy,
        *arguments: Any,
        **options: Any,
    ) -> None:
        if arguments and isinstance(arguments[0], int):
            options["max_num_requests"], arguments = arguments[0], arguments[1:]
        given = _Arguments(*arguments, **options)
        parameters = _parameters(
            str(trt_engine_path), model_type, max_beam_width, scheduler_policy, given.optional_params
        )
        self._session = _Session(parameters, given)
        # The session's threads have no reference to this object, so that it can be garbage-collected.
        weakref.finalize(self, self._session.shutdown)

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Take no more requests, finish the active ones, end the threads, and free the device. Idempotent.

        Any thread may call it. Called by a callback, it returns before the manager has ended.
        """
        self._session.shutdown()


def _parameters(
    path: str,
    model_type: TrtGptModelType,
    max_beam_width: int,
    policy: SchedulerPolicy,
    optional: TrtGptModelOptionalParams | None,
) -> Parameters:
    optional = optional or TrtGptModelOptionalParams()
    device_ids, mode = optional.device_ids, optional.decoding_mode
    config = ExecutorConfig(
        max_beam_width,
        SchedulerConfig(policy.value),
        optional.kv_cache_config,
        optional.enable_chunked_context,
        optional.normalize_log_probs,
        batching_type=BatchingType.STATIC if model_type is TrtGptModelType.V1 else BatchingType.INFLIGHT,
        max_batch_size=optional.max_num_sequences,
        parallel_config=None if device_ids is None else ParallelConfig(device_ids=device_ids),
        decoding_config=None if mode is None else DecodingConfig(mode),
        enable_trt_overlap=optional.enable_trt_overlap,
    )
    FieldChecker().check(config)
    parameters = to_parameters(config, path)
    check_parameters(parameters)
    return parameters


class _Session:
    """A running manager: its callbacks, called by the worker thread, and the thread that wakes it."""

    def __init__(self, parameters: Parameters, given: _Arguments) -> None:
        self._given = given
        self._prompts: dict[int, Prompt] = {}  # requests without final response; worker thread only
        self._is_over = threading.Event()
        self._worker: int | None = None  # identifier of the callbacks' thread
        model = given.load(parameters, "", None)
        engine = model.engine
        self._adapters = make_adapters(parameters, model, lambda: self._manager.notify())
        config = replace(
            parameters.scheduler,
            max_num_requests=given.max_num_requests,
            has_block_store=saves_blocks(parameters, model),
        )
        self._limits: ModelLimits = engine.limits.model_limits(config)
        self._manager = CoreGptManager(
            engine,
            Scheduler(config, engine.limits),
            self._get_inference_requests,
            self._send_response,
            self._poll_stop_signals if given.poll_stop_signal_cb else None,
            given.return_batch_manager_stats_cb,
            adapters=None if self._adapters is None else self._adapters.cache,
            block_store=make_block_store(parameters, model, lambda: self._manager.notify()),
        )
        threading.Thread(target=self._wake, name="gpt-manager-wake", daemon=True).start()

    def shutdown(self) -> None:
        self._is_over.set()
        if threading.get_ident() == self._worker:  # the worker cannot wait for its own end
            threading.Thread(target=self._end, name="gpt-manager-shutdown").start()
        else:
            self._end()

    def _end(self) -> None:
        self._manager.shutdown()
        if self._adapters is not None:
            self._adapters.cache.close()

    def _wake(self) -> None:
        """Wake the idle worker thread at intervals, so that it calls GetInferenceRequests."""
        while not self._is_over.wait(_POLL_S):
            self._manager.notify()

    # ---------------------------------------------------------------- callbacks, the worker thread

    def _get_inference_requests(self, max_num: int) -> list[Request]:
        self._worker = threading.get_ident()
        if self._is_over.is_set():
            return []
        requests: list[Request] = []
        for request in list(self._given.get_inference_requests_cb(max_num)):
            if request.request_id == self._given.terminate_req_id:
                self.shutdown()
                continue
            try:
                requests.append(self._begin(request))
            except InflightError as error:  # an error of one request
                self._given.send_response_cb(request.request_id, [], True, str(error))
        return requests

    def _begin(self, request: InferenceRequest) -> Request:
        if request.request_id in self._prompts:
            raise AlreadyExists(f"a request with id {request.request_id} is being processed")
        arrays = {name: _to_numpy(name, tensor) for name, tensor in request.tensors.items()}
        prompt = InferenceRequest(request.request_id, arrays).to_prompt(self._limits)
        self._prompts[request.request_id] = replace(prompt, request=prompt.request.without_weights())
        return prompt.request

    def _send_response(self, response: Response) -> None:
        prompt = self._prompts[response.request_id]
        if response.is_final:  # before the callback, after which the id may be used again
            del self._prompts[response.request_id]
        tensors = (
            [] if response.result is None else list(_named_tensors(Output(prompt, response.result, None)))
        )
        message = "" if response.error is None else str(response.error)
        self._given.send_response_cb(response.request_id, tensors, response.is_final, message)

    def _poll_stop_signals(self) -> list[StopSignal]:
        poll = self._given.poll_stop_signal_cb
        return [StopSignal(request_id) for request_id in poll()] if poll else []


def _to_numpy(name: str, tensor: Any) -> NDArray[Any]:
    """Return a torch or numpy tensor as an array. int64 is converted to uint64 for inputs of this type."""
    array = to_host_array(tensor)
    spec = INPUTS.sent_as(name, Vocabulary.TOKENS)
    is_unsigned = spec is not None and spec.dtype == "UINT64"
    return array.astype(np.uint64) if is_unsigned and array.dtype == np.int64 else array


def _named_tensors(output: Output) -> Iterator[NamedTensor]:
    """Return the outputs that the request asked for, without text."""
    import torch

    for spec in OUTPUTS.specs:
        if spec.name not in output.prompt.options.outputs or spec.dtype == "BYTES":
            continue
        array = make_array(spec.name, [output])
        if array is not None:
            whole = array[0] if spec.name in _WITHOUT_BATCH else array
            copy = np.array(whole, NUMPY_TYPES[spec.dtype])
            tensor = torch.from_numpy(copy)  # pyright: ignore[reportUnknownMemberType]  torch declares no array types
            yield NamedTensor(tensor, spec.name)
