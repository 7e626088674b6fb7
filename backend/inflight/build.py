"""Composition root: creates scheduler, GptManager, client and endpoint for a loaded model, and starts them.

`load_model` makes the engine. Parts are imported lazily, inside functions, so that a front end without an
engine never imports torch, and a single rank never imports MPI. Called once, on the thread that loads the
model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inflight.errors import ConfigError, InvalidArgument, Unavailable
from inflight.file_names import native
from inflight.load_model import load_model

if TYPE_CHECKING:
    from inflight.adapters.commands import AdapterCommands
    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments
    from inflight.batch_manager.kv_event_publisher import KvEventPublisher
    from inflight.batch_manager.watchdog import Watchdog
    from inflight.block_store import HostBlockStore
    from inflight.config import Parameters, SchedulingConfig
    from inflight.core.ports import (
        GetInferenceRequestsCallback,
        ReturnMetricsCallback,
        WaitUntilSent,
    )
    from inflight.core.request.engine_description import EngineDescription
    from inflight.core.request.request import Request
    from inflight.core.schedule.batch import EngineLimits
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer
    from inflight.endpoint.supervision import Supervision
    from inflight.engine.debug_tensors import DebugTensors, IterationTensors
    from inflight.errors import InflightError
    from inflight.guided.compiler import ChildCompiler
    from inflight.load_model import LoadedModel, LoadModel
    from inflight.parameter_spec import KvEventsConfig
    from inflight.ranks.rank_context import RankContext
    from inflight.receipts.engine_part import EngineReceipts
    from inflight.tracing import Tracer

__all__ = [
    "UNLOAD_TIMEOUT_S",
    "FollowingRank",
    "RunningEngine",
    "build_engine",
    "check_parameters",
    "make_adapters",
    "make_block_store",
    "saves_blocks",
    "start_engine",
    "start_following",
]

UNLOAD_TIMEOUT_S = 10.0
"""Seconds in which requests of other models' clients may finish at an unload. Triton itself waits for
requests of this model's clients."""
_FAIL_S = 5.0  # seconds to answer all requests with an error when the engine is lost
_LOOP_END_S = 2.0  # seconds to end a loop without requests

OnHang: TypeAlias = "Callable[[Unavailable], None]"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A loaded model with a running generation loop.

    Attributes:
        client: Engine client for front ends in this process.
    """

    client: LocalEngineClient
    _manager: GptManager
    _release: Callable[[], None]
    _guides: ChildCompiler | None = None
    _adapters: AdapterCommands | None = None
    _receipts: EngineReceipts | None = None
    _debug_tensors: DebugTensors | None = None
    _endpoint: EndpointServer | None = None
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def latest_debug_tensors(self) -> list[IterationTensors]:
        """Return the debug tensors of the iterations since the last call, oldest first. Any thread.

        There are at most debug_tensors_max_iterations entries, none without this parameter, and only this
        rank's tensors.
        """
        return [] if self._debug_tensors is None else self._debug_tensors.latest()

    def prepare_guides(self) -> None:
        """Set up guided decoding in the background, if this engine has not done so yet. Called once it serves.

        Otherwise the first request with a guide does, and pauses other requests for some tenths of a second.
        """
        if self._guides is not None:
            self._guides.prepare()

    def close(self, timeout_s: float = UNLOAD_TIMEOUT_S) -> bool:
        """Refuse new requests, finish or end requests in flight, end all threads, free the device. Idempotent.

        May be called on any thread except the loop thread. Takes at most `timeout_s` seconds, and up to seven
        more if the device hangs. The other ranks, if there are any, end too.

        Args:
            timeout_s: Seconds in which requests in flight may finish; afterwards they end with UNAVAILABLE.

        Returns:
            Whether the generation loop has ended. If not, it hangs in the device: every request has been
            answered, but the thread and the device's memory stay until the process ends.
        """
        with self._closing:
            try:
                self.client.drain(timeout_s, "the model is being unloaded")
                has_ended = self._manager.shutdown(_LOOP_END_S)
                if has_ended:
                    self._release()
                return has_ended
            finally:
                self.client.close()
                if self._endpoint is not None:
                    self._endpoint.close()  # the endpoint first sends the answers made so far
                if self._guides is not None:
                    self._guides.close()
                if self._adapters is not None:
                    self._adapters.cache.close()
                if self._receipts is not None:
                    self._receipts.close()

    def fail(self, error: InflightError) -> None:
        """Answer every request with `error`, including requests from other processes, even if the loop hangs.

        May be called on any thread except the loop thread. The engine cannot be used afterwards. Waits for a few
        seconds at most, because a loop that hangs while it delivers a response blocks all other deliveries.
        """

        def answer() -> None:
            self.client.fail_all(error)
            if self._endpoint is not None:
                self._endpoint.close()

        answering = threading.Thread(target=answer, name="engine-fail", daemon=True)
        answering.start()
        answering.join(_FAIL_S)


def check_parameters(parameters: Parameters) -> None:
    """Raise ConfigError if these parameters contradict each other, independent of the checkpoint.

    For callers that must release resources, such as an old engine, before they can build an engine.
    """
    parameters.scheduler.validate(parameters.engine.max_num_sequences, parameters.engine.tokens_per_block)
    parameters.validate_saved_blocks()


def _load_checked(
    load: LoadModel, parameters: Parameters, version_dir: str, rank_context: RankContext | None
) -> LoadedModel:
    """Load the model, and check default_end_ids against its vocabulary. ConfigError is raised on all ranks."""
    model = load(parameters, version_dir, rank_context)
    vocab_size = model.engine.limits.vocab_size
    for end_id in parameters.default_end_ids:
        if end_id >= vocab_size:
            raise ConfigError(
                f"default_end_ids has {end_id}, expected token ids in [0, {vocab_size - 1}], the vocabulary"
            )
    if rank_context is not None:
        rank_context.has_loaded()
    return model


# ---------------------------------------------------------------------- rank 0, which serves clients


def build_engine(
    parameters: Parameters,
    version_dir: str,
    endpoint_path: str,
    return_metrics: ReturnMetricsCallback | None = None,
    rank_context: RankContext | None = None,
    supervision: Supervision | None = None,
    load: LoadModel = load_model,
    on_hang: OnHang | None = None,
) -> RunningEngine:
    """Load the model and serve it to this process and to others. With several ranks, called on rank 0.

    Args:
        parameters: The parameters from config.pbtxt.
        version_dir: The Triton model's version folder, which contains the demo model.
        endpoint_path: Unix socket for front ends in other processes.
        return_metrics, rank_context, load: As for `start_engine`.
        supervision: The supervision, if another process supervises and ends this engine.
        on_hang: As for `start_engine`.

    Raises:
        ConfigError: The model cannot be loaded; the message names parameter or file.
    """
    from inflight.endpoint.server import EndpointServer

    engine = start_engine(parameters, version_dir, return_metrics, rank_context, load, on_hang)

    def retire(timeout_s: float) -> None:
        (supervision.retire if supervision else running.close)(timeout_s)

    try:
        endpoint = EndpointServer(engine.client, endpoint_path, engine.client.drain, retire, supervision)
    except Exception:  # raised again below; the engine must not keep running
        engine.close(0.0)
        raise
    running = replace(engine, _endpoint=endpoint)
    return running


def start_engine(
    parameters: Parameters,
    version_dir: str,
    return_metrics: ReturnMetricsCallback | None = None,
    rank_context: RankContext | None = None,
    load: LoadModel = load_model,
    on_hang: OnHang | None = None,
) -> RunningEngine:
    """Load the model and start the loop, without an endpoint. With several ranks, called on rank 0.

    Args:
        parameters: The parameters from config.pbtxt.
        version_dir: The Triton model's version folder, which contains the demo model.
        return_metrics: Called with statistics and metrics, at most once in `stats_check_period_ms`.
        rank_context: Rank 0's context if there are several ranks. The other ranks call `start_following` at
            the same time. Closing the engine leaves the context; if this function raises, the caller must
            leave it.
        load: Function that loads the model; each rank passes its own. `functools.partial(load_model, …)` can
            pass logits post-processors or a vocabulary as objects.
        on_hang: Called once, on its own thread, if an iteration takes longer than `hang_timeout_ms`. It must
            end this process, because other ranks may wait for it. None: hangs are not detected.

    Raises:
        ConfigError: The model cannot be loaded; the message names parameter or file.
    """
    from inflight.batch_manager import GptManager
    from inflight.core.scheduler import Scheduler
    from inflight.endpoint.local import LocalEngineClient

    model = _load_checked(load, parameters, version_dir, rank_context)
    limits = model.engine.limits
    parameters = replace(
        parameters, scheduler=replace(parameters.scheduler, has_block_store=saves_blocks(parameters, model))
    )
    scheduler = Scheduler(_with_kv_events(parameters), limits)
    instruments = _make_instruments(parameters, limits, return_metrics, on_hang)
    adapters = make_adapters(parameters, model, lambda: manager.notify())
    receipts = _make_receipts(parameters, model, lambda: manager.notify())
    client = LocalEngineClient(
        _describe(parameters, model),
        lambda: manager.notify(),
        lambda timeout_s: manager.state(timeout_s),  # front ends decide which clients may read the state
        lambda kind, timeout_s: manager.reports(kind, timeout_s),
        adapters,
        receipts,
        _make_tracer(parameters),
    )
    guides = _make_guide_compiler(parameters, model, lambda: manager.notify())
    manager = GptManager(
        model.engine,
        scheduler,
        _counting_iterations(client.get_inference_requests, rank_context),
        client.send_response,
        client.poll_stop_signals,
        stats_period_ns=parameters.stats_check_period_ms * 1_000_000,
        on_death=_loop_failure_reporter(client, rank_context),
        instruments=instruments,
        ranks=None if rank_context is None else rank_context.ranks,
        wait_until_sent=_wait_until_sent(client, limits.takes_all_processors, rank_context),
        guides=guides,
        adapters=None if adapters is None else adapters.cache,
        block_store=make_block_store(parameters, model, lambda: manager.notify()),
    )
    release = _release_once(model, rank_context)
    return RunningEngine(client, manager, release, guides, adapters, receipts, model.debug_tensors)


def saves_blocks(parameters: Parameters, model: LoadedModel) -> bool:
    """Return whether KV blocks are saved in host memory or files.

    Raises ConfigError if the parameters or the engine do not allow what is asked for.
    """
    host_bytes = _host_tier_bytes(parameters, model)
    parameters.validate_saved_blocks(has_host_tier=host_bytes > 0)
    is_asked_for = parameters.kv_cache_dir is not None or host_bytes > 0
    if is_asked_for and model.block_memory is None:
        name = "kv_cache_host_memory_bytes" if parameters.kv_cache_dir is None else "kv_cache_dir"
        raise ConfigError(f"{name} is given, but this engine has no KV blocks that can be saved")
    return is_asked_for


def _host_tier_bytes(parameters: Parameters, model: LoadedModel) -> int:
    """Return the host memory for saved blocks; 0 on a CPU, where it is a part of the cache."""
    is_on_host = model.block_memory is not None and model.block_memory.is_on_host
    return 0 if is_on_host else parameters.engine.kv_cache_host_memory_bytes


def make_block_store(
    parameters: Parameters, model: LoadedModel, notify: Callable[[], None]
) -> HostBlockStore | None:
    """Return the store of KV blocks in host memory and files; None if blocks are not saved (`saves_blocks`).

    Raises ConfigError if the folder cannot be used.
    """
    folder, memory = parameters.kv_cache_dir, model.block_memory
    if memory is None or not saves_blocks(parameters, model):
        return None
    from inflight.block_store import BlockFiles, HostBlockStore, cache_identity
    from inflight.receipts.engine_part import given_parameters, model_folders, versions

    files = None
    if folder is not None:
        settings = versions() | given_parameters(parameters) | asdict(model.code)
        settings |= {"dtype": model.dtype, "sizes": (memory.block_bytes, memory.state_bytes)}
        identity = cache_identity(model_folders(parameters, native(model.model_path)), settings)
        files = BlockFiles(
            Path(native(folder)),
            identity,
            max(memory.block_bytes, memory.state_bytes),
            parameters.kv_cache_disk_bytes,
            parameters.kv_cache_max_age_s,
        )
    host_bytes = _host_tier_bytes(parameters, model)
    return HostBlockStore(memory, model.engine.limits.tokens_per_block, notify, host_bytes, files)


def _make_receipts(parameters: Parameters, model: LoadedModel, notify: Callable[[], None]) -> EngineReceipts:
    """Return the maker of receipts; raise ConfigError if the key for their signatures cannot be read."""
    from inflight.receipts.document import EngineForm, read_key
    from inflight.receipts.engine_part import EngineReceipts, given_parameters, model_folders

    key_file = native(parameters.receipt_key_file) if parameters.receipt_key_file else ""
    if key_file:
        try:
            read_key(Path(key_file))
        except InvalidArgument as error:
            raise ConfigError(f"receipt_key_file is {parameters.receipt_key_file!r}: {error}") from None
    code = model.code
    made = EngineForm(
        dtype=model.dtype,
        kernels=code.kernels,
        device=code.device,
        instruction_set=code.instruction_set,
        parameters=given_parameters(parameters),
    )
    path = native(model.model_path)
    return EngineReceipts(Path(path).name, model_folders(parameters, path), made, key_file, notify)


def _make_guide_compiler(
    parameters: Parameters, model: LoadedModel, notify: Callable[[], None]
) -> ChildCompiler | None:
    """Return the compiler of guides, which runs in another process; None without a tokenizer."""
    if model.grammars is None:
        return None
    from inflight.guided.compiler import ChildCompiler, GuideBounds

    bounds = GuideBounds(
        parameters.guided_decoding_max_guide_bytes, parameters.guided_decoding_compile_timeout_ms / 1000
    )
    return ChildCompiler(model.grammars, parameters.guided_decoding_backend, bounds, notify)


def make_adapters(
    parameters: Parameters, model: LoadedModel, notify: Callable[[], None]
) -> AdapterCommands | None:
    """Return rank 0's adapters, including adapters in the prefetch folder; None if the engine takes no adapters.

    Args:
        parameters: The parameters from config.pbtxt.
        model: The model whose engine uses the adapters.
        notify: Function that wakes the engine's loop; called on any thread.

    Raises:
        ConfigError: There is no memory for adapters that the parameters name, or a folder is missing.
    """
    limits = model.engine.limits
    if not (limits.num_adapter_pages and model.model_path):
        named = (parameters.lora_adapters, parameters.lora_dir, parameters.lora_prefetch_dir)
        if any(named):
            raise ConfigError(
                "lora_adapters, lora_dir and lora_prefetch_dir name adapters, but this engine takes none: "
                "lora_cache_gpu_memory_fraction is 0, or leaves no room for one of lora_cache_max_adapter_size, "
                "or transformers' own code runs the model"
            )
        return None
    from inflight.adapters.commands import AdapterCommands
    from inflight.adapters.host import make_adapter_cache
    from inflight.adapters.sources import AdapterFolders
    from inflight.models import read_model_description

    def folder(path: str | None) -> Path | None:
        return None if path is None else Path(native(path))

    folders = AdapterFolders(
        {name: Path(native(path)) for name, path in parameters.lora_adapters},
        folder(parameters.lora_dir),
        folder(parameters.lora_prefetch_dir),
    )
    cache = make_adapter_cache(
        read_model_description(model.model_path),
        limits.max_adapter_rank,
        parameters.lora_cache_host_memory_bytes,
        "float32" if parameters.lora_weights_data_type == "TYPE_FP32" else "float16",
        notify,
        folders,
    )
    return AdapterCommands(cache, folders)


def _describe(parameters: Parameters, model: LoadedModel) -> EngineDescription:
    """Return the description of the engine for front ends."""
    from inflight.core.request.engine_description import EngineDescription

    limits = model.engine.limits
    beside_weights = Path(native(model.model_path)) / "tokenizer.json"
    found = model.model_path if model.model_path and beside_weights.is_file() else ""
    return EngineDescription(
        limits=limits.model_limits(parameters.scheduler),
        model_path=model.model_path,
        tokenizer_dir=parameters.tokenizer_dir or found,
        # A checkpoint may have an end id outside of its vocabulary, which no sequence can generate.
        eos_token_ids=tuple(token_id for token_id in model.eos_token_ids if token_id < limits.vocab_size),
        default_end_ids=parameters.default_end_ids,
        exclude_input_from_output=bool(parameters.exclude_input_in_output),
        dtype=model.dtype,
        state_enabled=parameters.enable_state_requests,
        adapter_commands_enabled=parameters.enable_adapter_commands,
    )


def _make_tracer(parameters: Parameters) -> Tracer | None:
    """Raises ConfigError if the endpoint is no URL."""
    if parameters.otlp_traces_endpoint is None:
        return None
    from inflight.tracing import Tracer

    return Tracer(parameters.otlp_traces_endpoint)


def _with_kv_events(parameters: Parameters) -> SchedulingConfig:
    """Return the scheduler's part of the parameters, with room for the events of an iteration if they are
    published."""
    config, found = parameters.kv_events_config, parameters.scheduler
    if config is None:
        return found
    return replace(found, kv_event_buffer_size=max(found.kv_event_buffer_size, config.max_queue_size))


def _make_instruments(
    parameters: Parameters,
    limits: EngineLimits,
    return_metrics: ReturnMetricsCallback | None,
    on_hang: OnHang | None,
) -> Instruments:
    from inflight.batch_manager.instruments import Instruments
    from inflight.batch_manager.kv_event_buffer import KvEventBuffer
    from inflight.batch_manager.recording import JsonRecorder
    from inflight.batch_manager.statistics_rings import StatisticsRings
    from inflight.serving.memory import measure_memory

    path, config = parameters.record_path, parameters.kv_events_config
    num_events = parameters.scheduler.kv_event_buffer_size
    return Instruments(
        recorder=JsonRecorder(path, parameters.scheduler, limits) if path else None,
        watchdog=_make_watchdog(parameters, on_hang),
        rings=StatisticsRings(parameters.iter_stats_max_iterations, parameters.request_stats_max_iterations),
        kv_events=KvEventBuffer(num_events) if num_events else None,
        kv_publisher=None if config is None else _make_kv_publisher(config, parameters, limits),
        return_metrics=return_metrics,
        measure_memory=measure_memory,
    )


def _make_kv_publisher(
    config: KvEventsConfig, parameters: Parameters, limits: EngineLimits
) -> KvEventPublisher:
    """Raises ConfigError if no block can be found again, or an address of `config` cannot be used."""
    from inflight.batch_manager.kv_event_publisher import KvEventPublisher

    if not parameters.scheduler.enable_kv_cache_reuse:
        raise ConfigError(
            "kv_events_config is given, but enable_kv_cache_reuse is false, so no request would find a KV block"
        )
    saved = "CPU" if parameters.kv_cache_dir is None else "DISK"
    return KvEventPublisher(config, limits.tokens_per_block, saved)


def _make_watchdog(parameters: Parameters, on_hang: OnHang | None) -> Watchdog | None:
    from inflight.batch_manager.watchdog import Watchdog

    stuck_ms, hang_ms = parameters.watchdog_timeout_ms, parameters.hang_timeout_ms
    if on_hang is None or not hang_ms:
        return Watchdog(stuck_ms / 1000) if stuck_ms else None

    def report_hang(line: str) -> None:
        on_hang(Unavailable(f"the engine hangs, and ends (hang_timeout_ms): {line}"))

    return Watchdog((stuck_ms or hang_ms) / 1000, hang_timeout_s=hang_ms / 1000, on_hang=report_hang)


def _counting_iterations(
    get_inference_requests: GetInferenceRequestsCallback, rank_context: RankContext | None
) -> GetInferenceRequestsCallback:
    """Wrap the callback that begins an iteration, so that rank 0's heartbeat counts iterations."""
    if rank_context is None:
        return get_inference_requests

    def get(max_num: int) -> Sequence[Request]:
        rank_context.ranks.advance()
        return get_inference_requests(max_num)

    return get


def _wait_until_sent(
    client: LocalEngineClient, takes_all_processors: bool, rank_context: RankContext | None
) -> WaitUntilSent | None:
    """Return a function that waits between iterations until responses are sent; None if it must not wait.

    Waiting is needed only for a model that uses all processors. With several ranks this returns None,
    because the other ranks would wait for this rank in a broadcast, which uses the processors that the
    senders need.
    """
    return client.wait_until_sent if takes_all_processors and rank_context is None else None


def _loop_failure_reporter(
    client: LocalEngineClient, rank_context: RankContext | None
) -> Callable[[InflightError], None]:
    """Return a function that reports a failure of the loop to clients and other ranks."""

    def report(error: InflightError) -> None:
        client.fail_all(error)
        if rank_context is not None:
            rank_context.report_dead_loop()

    return report


def _release_once(model: LoadedModel, rank_context: RankContext | None) -> Callable[[], None]:
    """Return a function that releases the model and leaves the rank context; later calls do nothing."""
    steps = [] if rank_context is None else [model.release, rank_context.leave]

    def release() -> None:
        while steps:
            steps.pop(0)()

    return release


# ---------------------------------------------------------------------- the other ranks


@dataclass(frozen=True, slots=True)
class FollowingRank:
    """A rank other than 0, whose loop repeats the iterations of rank 0."""

    _manager: GptManager
    _release: Callable[[], None]
    _deaths: Sequence[InflightError]

    def wait(self) -> bool:
        """Wait until rank 0 ends.

        Returns whether it ended in order, after which all ranks have left the rank context.
        """
        self._manager.join()
        if self._deaths:
            return False
        self._manager.shutdown()
        self._release()
        return True


def start_following(
    parameters: Parameters, version_dir: str, rank_context: RankContext, load: LoadModel = load_model
) -> FollowingRank:
    """Load a part of the model on a rank other than 0 and start its loop.

    Rank 0 calls `start_engine` at the same time.

    Raises ConfigError, on all ranks, if the model cannot be loaded.
    """
    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments
    from inflight.core.scheduler import Scheduler

    model = _load_checked(load, parameters, version_dir, rank_context)
    deaths: list[InflightError] = []
    manager = GptManager(
        model.engine,
        Scheduler(parameters.scheduler, model.engine.limits),
        lambda max_num: (),
        lambda response: None,
        on_death=deaths.append,
        instruments=Instruments(watchdog=_make_watchdog(parameters, on_hang=None)),  # rank 0 detects the hang
        ranks=rank_context.ranks,
    )
    return FollowingRank(manager, _release_once(model, rank_context), deaths)
