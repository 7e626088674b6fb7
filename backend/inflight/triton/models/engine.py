"""`tensorrt_llm`: the model that holds the engine, and serves the engine endpoint for other models.

Starts and ends the engine. It runs in this process, in several ranks of which this process is one, or in
several ranks that this process starts. Triton calls it on one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from inflight.config import CapacityPolicy, Parameters, Role
from inflight.endpoint.client import retire_predecessor
from inflight.endpoint.path import endpoint_path
from inflight.errors import ConfigError, InflightError
from inflight.processes import exempt_from_collection, this_parent
from inflight.ranks.job import Job
from inflight.ranks.launch import LaunchMode, find_launch_mode, waits_for_leader
from inflight.ranks.orchestrator import ModelControl, Orchestrator, Surroundings
from inflight.server.guard import SILENCE_S, Guard, guard_in_server, keep_private
from inflight.server.runtime_directory import note_initialized
from inflight.serving.completion_text import TokenizerFinder
from inflight.serving.metric_table import Batching
from inflight.triton.front_end import FrontEnd
from inflight.triton.host import (
    ModelArgs,
    complete_config,
    has_explicit_control,
    import_pb_utils,
    log_to_triton,
    read_model_args,
)
from inflight.triton.leader import Leader, claim_rank, refuse_ranks
from inflight.triton.metrics import MetricsPublisher
from inflight.triton.metrics_on_demand import MetricsOnDemand

if TYPE_CHECKING:
    from inflight.build import RunningEngine
    from inflight.load_model import LoadedModel
    from inflight.ranks.rank_context import RankContext

_EXIT_TIMEOUT_S = 10
_FLUSH_S = 2.0


class TritonPythonModel:
    """Serves token ids and text, with several responses per request."""

    auto_complete_config = staticmethod(complete_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine. Raises ConfigError with every problem found in config.pbtxt."""
        keep_private()
        pb_utils = import_pb_utils()
        log_to_triton(pb_utils)
        self._pb_utils = pb_utils
        self._engine: RunningEngine | Leader | Orchestrator | None = None
        self._running: RunningEngine | None = None  # only if the engine is in this process
        self._front_end: FrontEnd | None = None
        self._guard: Guard | None = None
        model, self._mode = _read(args)
        # The path has the process id of the stub's parent, the server, so that two servers on a machine do
        # not collide.
        path = model.parameters.engine_endpoint or endpoint_path(os.getppid(), model.name)
        is_static = model.parameters.scheduler.policy is CapacityPolicy.STATIC_BATCH
        batching = Batching.STATIC if is_static else Batching.INFLIGHT
        version, log = model.version_dir.name, pb_utils.Logger.log_verbose
        self._publisher = MetricsPublisher(pb_utils, model.name, version, log, batching)
        self._on_demand = MetricsOnDemand(self._update_metrics, model.name)
        try:
            self._engine = engine = self._make_engine(model, path)
            tokenizers = TokenizerFinder(model.parameters.tokenizer_dir)
            tokenizers.find(engine.client.describe().tokenizer_dir)
            self._front_end = FrontEnd(pb_utils, engine.client, self._close_engine, model, tokenizers)
            if self._guard is not None:
                has_ranks = self._mode is not LaunchMode.IN_PROCESS
                self._guard.beat(model.parameters.rank_timeout_ms / 1000 if has_ranks else SILENCE_S)
            exempt_from_collection()
            if self._running is not None:
                self._running.prepare_guides()
            note_initialized(model.name)
        except BaseException:  # Triton does not call finalize if initialize raises
            if self._engine is not None:
                self._engine.close()
            self._end()
            raise

    def execute(self, requests: Sequence[Any]) -> None:
        """Admit requests. The sender thread sends their responses later."""
        assert self._front_end is not None, "execute before initialize"
        self._front_end.execute(requests)

    def finalize(self) -> None:
        """Answer all requests in flight and free the engine."""
        assert self._front_end is not None, "finalize before initialize"
        self._front_end.close()
        self._end()
        if not self._has_ended:
            # If the device hangs, the process's exit may hang too, and Triton would wait for it forever.
            signal.alarm(_EXIT_TIMEOUT_S)

    def _close_engine(self) -> None:
        assert self._engine is not None, "a front end without an engine"
        self._has_ended = self._engine.close()

    def _end(self) -> None:
        self._on_demand.close()
        self._publisher.close()
        if self._guard is None:
            return
        if self._mode is LaunchMode.LEADER:
            self._guard.rest()
        else:
            self._guard.dismiss()

    # ---------------------------------------------------------------- where the engine is

    def _make_engine(self, model: ModelArgs, path: str) -> RunningEngine | Leader | Orchestrator:
        job = Job.of(model.parameters, str(model.version_dir.absolute()), path)
        if self._mode is LaunchMode.ORCHESTRATOR:
            return self._orchestrate(job, model.name)
        if self._mode is LaunchMode.LEADER:
            return self._lead(job, model.name)
        from inflight.build import UNLOAD_TIMEOUT_S, build_engine

        self._guard = guard_in_server(model.name)
        # Triton keeps an unloaded model alive while a client holds a stream that used it, but there is one
        # endpoint path, and memory for one engine only.
        retire_predecessor(path, UNLOAD_TIMEOUT_S)
        self.import_engine()
        self._running = build_engine(
            job.parameters,
            job.version_dir,
            path,
            self._publish,
            load=self.load_model,
            on_hang=self._lose_engine,
        )
        return self._running

    def import_engine(self) -> None:
        """Import what `load_model` needs. A subclass that overrides `load_model` may override this."""
        from inflight.load_model import import_for_good

        import_for_good()

    def load_model(
        self, parameters: Parameters, version_dir: str, rank_context: RankContext | None
    ) -> LoadedModel:
        """Load the model of an engine in this process with `inflight.load_model`. A subclass may override this."""
        from inflight.load_model import load_model

        return load_model(parameters, version_dir, rank_context)

    def _lead(self, job: Job, name: str) -> Leader:
        with claim_rank() as claim:
            self._guard = guard = Guard(sys.executable, name, claim.fileno())
        leader = Leader(job, self._publish, self._end_server)
        guard.remove_later(leader.shared_memory)
        return leader

    def _orchestrate(self, job: Job, name: str) -> Orchestrator:
        from inflight.build import UNLOAD_TIMEOUT_S

        self._guard, server = Guard(sys.executable, name), this_parent()
        control = None
        if has_explicit_control(server):  # this thread must not call ModelControl
            triton = self._pb_utils
            control = ModelControl(partial(triton.unload_model, name), partial(triton.load_model, name))
        around = Surroundings(server, control, self._guard, self._publisher, UNLOAD_TIMEOUT_S)
        return Orchestrator(job, around)

    def _lose_engine(self, error: InflightError) -> None:
        """End the server because this process's engine hangs. Runs on a thread that the loop cannot block."""
        if self._guard is None:  # no server to end
            self._pb_utils.Logger.log_error(str(error))
            return
        if self._running is not None:
            self._running.fail(error)
        self._end_server(error)

    def _update_metrics(self, timeout_s: float) -> None:
        """Publish the metrics of all requests answered so far. Runs on a thread of its own."""
        if self._engine is not None:
            with contextlib.suppress(InflightError):  # a lost engine reports nothing more
                self._engine.client.state(timeout_s / 2)  # after the loop has reported its last responses
        self._publisher.flush(timeout_s / 2)

    def _publish(self, stats: Any, metrics: Any) -> None:
        self._publisher.put(stats, metrics, time.time())

    def _end_server(self, error: InflightError) -> None:
        """End the server because the engine is lost.

        Runs on a thread of its own, once all requests are answered.
        """
        self._pb_utils.Logger.log_error(f"the server ends: {error}")
        if self._front_end is not None:
            self._front_end.flush(_FLUSH_S)
        assert self._guard is not None, "an engine without a guard cannot end the server"
        self._guard.end_server()


def _read(args: Mapping[str, str]) -> tuple[ModelArgs, LaunchMode]:
    from inflight.build import check_parameters

    try:
        model = read_model_args(args, Role.ENGINE)
        check_parameters(model.parameters)
        asked_for = model.parameters.launch_mode
        sizes = model.parameters.tensor_parallel_size, model.parameters.pipeline_parallel_size
        return model, find_launch_mode(asked_for, *sizes)
    except ConfigError as error:
        if waits_for_leader():
            refuse_ranks(str(error))
        raise
