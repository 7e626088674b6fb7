"""Composition root: parameters → engine, scheduler, GptManager, client and endpoint, wired together.

With `composition`, the only code that knows every part. Imports the parts lazily, inside functions, so that a
front end that never builds an engine never imports torch, and one rank alone no MPI. Called once, on the thread
that loads the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inflight.composition.settings import check_parameters

if TYPE_CHECKING:
    from inflight.batch_manager import GptManager
    from inflight.composition.models import LoadedModel
    from inflight.config import Parameters
    from inflight.core.ports import GetInferenceRequestsCallback, ReturnMetricsCallback, WaitUntilSent
    from inflight.core.request.request import Request
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer
    from inflight.endpoint.supervision import Supervision
    from inflight.errors import InflightError
    from inflight.ranks.rank_context import RankContext

__all__ = ["UNLOAD_TIMEOUT_S", "RunningEngine", "build_engine", "check_parameters", "follow"]

UNLOAD_TIMEOUT_S = 10.0
"""How long requests of other models' clients may go on; Triton lets those of this one finish before it unloads."""
_LOOP_END_S = 2.0  # for a loop that has nothing left to do


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A loaded model that takes requests.

    Attributes:
        client: For front ends in this process.
    """

    client: LocalEngineClient
    _manager: GptManager
    _endpoint: EndpointServer
    _release: Callable[[], None] = lambda: None
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self, timeout_s: float = UNLOAD_TIMEOUT_S) -> bool:
        """Take no more requests, finish or end those in flight, end every thread, free the device. Idempotent.

        Any thread but the loop's. Takes `timeout_s` seconds at most, and up to seven more where the device hangs.
        The other ranks, if there are any, end too.

        Args:
            timeout_s: How long requests in flight may go on before they are ended with UNAVAILABLE.

        Returns:
            Whether the generation loop has ended. If not, it hangs in the device; every request is answered all
            the same, but the thread and the device's memory stay until the process ends.
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
                self._endpoint.close()  # last: it sends on what has been answered

    def fail(self, error: InflightError) -> None:
        """Answer everything with `error`, in other processes too, although the loop may hang; any thread but its.

        The process is of no further use then.
        """
        self.client.fail_all(error)
        self._endpoint.close()


def build_engine(
    parameters: Parameters,
    version_dir: str,
    endpoint_path: str,
    return_metrics: ReturnMetricsCallback | None = None,
    rank_context: RankContext | None = None,
    supervision: Supervision | None = None,
) -> RunningEngine:
    """Load the model and start serving it; with several ranks, on rank 0.

    Args:
        parameters: What config.pbtxt says.
        version_dir: The Triton model's version folder; the demo model lies in it.
        endpoint_path: Unix socket for front ends in other processes.
        return_metrics: Takes statistics and metrics, at most once in `stats_check_period_ms`.
        rank_context: Rank 0's among several ranks; the others call `follow` meanwhile. Left when the engine is
            closed in order; where this raises, the caller leaves it.
        supervision: For an engine whose life another process decides about.

    Raises:
        ConfigError: what is wrong, by parameter or file.
    """
    from inflight.batch_manager import GptManager
    from inflight.composition.models import load
    from inflight.composition.settings import describe, instruments, scheduler_config
    from inflight.core.scheduler import Scheduler
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer

    config = scheduler_config(parameters)
    model = load(parameters, version_dir, rank_context)
    scheduler = Scheduler(config, model.engine.limits)
    client = LocalEngineClient(
        describe(parameters, model, config),
        lambda: manager.notify(),
        (lambda timeout_s: manager.state(timeout_s)) if parameters.enable_state_requests else None,
    )

    manager = GptManager(
        model.engine,
        scheduler,
        _counting(client.get_inference_requests, rank_context),
        client.send_response,
        client.poll_stop_signals,
        stats_period_ns=parameters.stats_check_period_ms * 1_000_000,
        on_death=_dying(client, rank_context),
        instruments=instruments(parameters, config, model.engine.limits, return_metrics),
        ranks=None if rank_context is None else rank_context.ranks,
        wait_until_sent=_wait_until_sent(client, model, rank_context),
    )

    release = _releasing(model, rank_context)
    retire = supervision.retire if supervision else lambda timeout_s: running.close(timeout_s)
    try:
        endpoint = EndpointServer(client, endpoint_path, client.drain, retire, supervision)
    except Exception:
        if manager.shutdown(_LOOP_END_S):
            release()
        raise
    running = RunningEngine(client, manager, endpoint, release)
    return running


def _counting(
    get_inference_requests: GetInferenceRequestsCallback, rank_context: RankContext | None
) -> GetInferenceRequestsCallback:
    """The callback that begins an iteration, which the heartbeat wants to know of."""
    if rank_context is None:
        return get_inference_requests

    def get(max_num: int) -> Sequence[Request]:
        rank_context.ranks.advance()
        return get_inference_requests(max_num)

    return get


def _wait_until_sent(
    client: LocalEngineClient, model: LoadedModel, rank_context: RankContext | None
) -> WaitUntilSent | None:
    """What lets responses be sent between iterations, where the model would take the processors from the senders.

    None with several ranks: the others wait for this one in a broadcast, on processors that senders would need.
    """
    return (
        client.wait_until_sent if model.engine.limits.takes_all_processors and rank_context is None else None
    )


def _dying(client: LocalEngineClient, rank_context: RankContext | None) -> Callable[[InflightError], None]:
    """What is to be done when the loop has died: nobody may wait for it, neither clients nor ranks."""

    def die(error: InflightError) -> None:
        client.fail_all(error)
        if rank_context is not None:
            rank_context.report_dead_loop()

    return die


def _releasing(model: LoadedModel, rank_context: RankContext | None) -> Callable[[], None]:
    """What ends this rank's ties to the others, once."""
    steps = [] if rank_context is None else [model.release, rank_context.leave]

    def release() -> None:
        while steps:
            steps.pop(0)()

    return release


def follow(parameters: Parameters, version_dir: str, rank_context: RankContext) -> bool:
    """Run a rank other than 0, from its load to rank 0's end.

    Returns whether that was in order; all ranks have left then.

    Raises ConfigError, on all ranks, if the model cannot be loaded.
    """
    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments, Watchdog
    from inflight.composition.models import load
    from inflight.composition.settings import scheduler_config
    from inflight.core.scheduler import Scheduler

    model = load(parameters, version_dir, rank_context)
    deaths: list[InflightError] = []
    timeout_ms = parameters.watchdog_timeout_ms
    manager = GptManager(
        model.engine,
        Scheduler(scheduler_config(parameters), model.engine.limits),
        lambda max_num: (),
        lambda response: None,
        on_death=deaths.append,
        instruments=Instruments(watchdog=Watchdog(timeout_ms / 1000) if timeout_ms else None),
        ranks=rank_context.ranks,
    )
    manager.join()
    if deaths:
        return False
    manager.shutdown()
    model.release()
    rank_context.leave()
    return True
