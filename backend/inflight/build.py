"""Composition root: creates scheduler, GptManager, client and endpoint for a loaded model, and starts them.

`load_model` makes the engine, and `engine_parts` the parts beside it. Parts are imported lazily, inside
functions, so that a front end without an engine never imports torch, and a single rank never imports MPI. Called
once, on the thread that loads the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inflight import environment
from inflight.engine_parts import (
    describe,
    make_adapters,
    make_block_store,
    make_guide_compiler,
    make_instruments,
    make_model_memory,
    make_receipts,
    make_tracer,
    make_watchdog,
    share_block_store,
    with_kv_events,
    with_saved_blocks,
)
from inflight.errors import ConfigError
from inflight.load_model import load_model

if TYPE_CHECKING:
    from inflight.adapters.commands import AdapterCommands
    from inflight.batch_manager import GptManager
    from inflight.block_store import BlockMemory
    from inflight.config import Parameters
    from inflight.core.ports import (
        GetInferenceRequestsCallback,
        ReturnMetricsCallback,
        WaitUntilSent,
    )
    from inflight.core.request.request import Request
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer
    from inflight.endpoint.supervision import Supervision
    from inflight.engine.debug_tensors import DebugTensors, IterationTensors
    from inflight.engine_parts import OnHang
    from inflight.errors import InflightError
    from inflight.guided.compiler import ChildCompiler
    from inflight.load_model import LoadedModel, LoadModel
    from inflight.ranks.rank_context import RankContext
    from inflight.receipts.engine_part import EngineReceipts

__all__ = [
    "UNLOAD_TIMEOUT_S",
    "FollowingRank",
    "RunningEngine",
    "build_engine",
    "check_parameters",
    "start_engine",
    "start_following",
]

UNLOAD_TIMEOUT_S = 10.0
"""Seconds in which requests of other models' clients may finish at an unload. Triton itself waits for
requests of this model's clients."""
_FAIL_S = 5.0  # seconds to answer all requests with an error when the engine is lost
_LOOP_END_S = 2.0  # seconds to end a loop without requests


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
    """Load the model, and check the environment variables, and default_end_ids against the vocabulary.

    ConfigError is raised on all ranks.
    """
    with _step_of_all(rank_context):
        if faults := environment.faults(os.environ):
            raise ConfigError("; ".join(faults))
    model = load(parameters, version_dir, rank_context)
    parameters.validate_end_ids(model.engine.limits.vocab_size)
    if rank_context is not None:
        rank_context.has_loaded()
    return model


def _step_of_all(rank_context: RankContext | None) -> AbstractContextManager[None]:
    """Return a step of loading: if it fails on one rank, ConfigError is raised on all of them."""
    return nullcontext() if rank_context is None else rank_context.agreement.step()


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

    model = _load_checked(load, parameters, version_dir, rank_context)
    parameters, limits = with_saved_blocks(parameters, model), model.engine.limits

    def notify() -> None:
        manager.notify()

    own_store = make_block_store(parameters, model, notify) if rank_context is None else None
    store = own_store if rank_context is None else share_block_store(parameters, model, notify, rank_context)
    with ExitStack() as undo:
        if store is not None:
            undo.callback(store.close)
        with _step_of_all(rank_context):
            scheduler = Scheduler(with_kv_events(parameters), limits)
            instruments = make_instruments(parameters, model, return_metrics, on_hang)
            adapters = make_adapters(parameters, model, notify)
            receipts = make_receipts(parameters, model, notify)
            client = _local_client(
                parameters,
                model,
                lambda: manager,
                adapters,
                receipts,
                None if rank_context else lambda same: _load_checked(load, same, version_dir, None),
                own_store.use_memory if own_store else lambda _: None,
            )
            guides = make_guide_compiler(parameters, model, notify)
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
            block_store=store,
        )
        undo.pop_all()
        release = _release_once(model, rank_context)
        return RunningEngine(client, manager, release, guides, adapters, receipts, model.debug_tensors)


def _local_client(
    parameters: Parameters,
    model: LoadedModel,
    manager: Callable[[], GptManager],
    adapters: AdapterCommands | None,
    receipts: EngineReceipts | None,
    load_again: Callable[[Parameters], LoadedModel] | None,
    use_blocks: Callable[[BlockMemory | None], None],
) -> LocalEngineClient:
    """Return the client by which front ends in this process use the engine.

    Args:
        parameters: The parameters, with the saved blocks that the model has.
        model: The loaded model.
        manager: Returns the loop's manager, which is made after the client, and before the client is used.
        adapters, receipts: The engine's parts, if it has them.
        load_again: Loads the model when a sleeping engine wakes up; None: the engine cannot sleep.
        use_blocks: Gives the block store another KV cache, or none.
    """
    from inflight.endpoint.local import LocalEngineClient

    memory = make_model_memory(
        parameters,
        model,
        load_again,
        lambda keeps_cache: manager().close_engine(keeps_cache),
        lambda engine: manager().replace_engine(engine),
        use_blocks,
    )
    return LocalEngineClient(
        describe(parameters, model),
        lambda: manager().notify(),
        lambda timeout_s: manager().state(timeout_s),  # front ends decide which clients may read the state
        lambda kind, timeout_s: manager().reports(kind, timeout_s),
        adapters,
        receipts,
        make_tracer(parameters),
        memory,
    )


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
    parameters = with_saved_blocks(parameters, model)
    store = share_block_store(parameters, model, lambda: None, rank_context)
    deaths: list[InflightError] = []
    with ExitStack() as undo:
        if store is not None:
            undo.callback(store.close)
        with rank_context.agreement.step():  # in which rank 0 makes the parts that only it has
            pass
        manager = GptManager(
            model.engine,
            Scheduler(parameters.scheduler, model.engine.limits),
            lambda max_num: (),
            lambda response: None,
            on_death=deaths.append,
            instruments=Instruments(watchdog=make_watchdog(parameters, None)),  # rank 0 detects the hang
            ranks=rank_context.ranks,
            block_store=store,
        )
        undo.pop_all()
    return FollowingRank(manager, _release_once(model, rank_context), deaths)
