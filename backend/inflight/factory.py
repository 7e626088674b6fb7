"""Composition root: parameters → engine, scheduler, GptManager, client and endpoint, wired together.

The only module that knows every part. Imports the parts lazily, inside functions, so that a front end that never
builds an engine never imports torch. Called once, on the thread that loads the model.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments
    from inflight.core.batch import EngineLimits
    from inflight.core.config import SchedulerConfig
    from inflight.core.description import EngineDescription
    from inflight.core.ports import Engine, ReturnMetricsCallback
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer
    from inflight.triton.parameters import Parameters

DEMO_MODEL = "demo_model"
UNLOAD_TIMEOUT_S = 10.0
"""How long requests of other models' clients may go on; Triton lets those of this one finish before it unloads."""
_LOOP_END_S = 2.0  # for a loop that has nothing left to do

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A loaded model that takes requests.

    Attributes:
        client: For front ends in this process.
    """

    client: LocalEngineClient
    _manager: GptManager
    _endpoint: EndpointServer
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self, timeout_s: float = UNLOAD_TIMEOUT_S) -> bool:
        """Take no more requests, finish or end those in flight, end every thread, free the device. Idempotent.

        Any thread but the loop's. Takes `timeout_s` seconds at most, and up to seven more where the device hangs.

        Args:
            timeout_s: How long requests in flight may go on before they are ended with UNAVAILABLE.

        Returns:
            Whether the generation loop has ended. If not, it hangs in the device; every request is answered all
            the same, but the thread and the device's memory stay until the process ends.
        """
        with self._closing:
            try:
                self.client.drain(timeout_s, "the model is being unloaded")
                return self._manager.shutdown(_LOOP_END_S)
            finally:
                self.client.close()
                self._endpoint.close()  # last: it sends on what has been answered


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine, and what its checkpoint says to front ends."""

    engine: Engine
    model_path: str
    dtype: str
    eos_token_ids: tuple[int, ...]


def check_parameters(parameters: Parameters) -> None:
    """Raise ConfigError where these parameters do not go together, whatever the checkpoint is.

    For whoever has to give something up before an engine can be built.
    """
    _scheduler_config(parameters).validate(parameters.max_num_sequences, parameters.tokens_per_block)
    if parameters.fake_engine:
        _parse_fake(parameters.fake_engine)


def build_engine(
    parameters: Parameters,
    version_dir: str,
    endpoint_path: str,
    return_metrics: ReturnMetricsCallback | None = None,
) -> RunningEngine:
    """Load the model and start serving it.

    Args:
        parameters: What config.pbtxt says.
        version_dir: The Triton model's version folder; the demo model lies in it.
        endpoint_path: Unix socket for front ends in other processes.
        return_metrics: Takes statistics and metrics, at most once in `stats_check_period_ms`.

    Raises:
        ConfigError: what is wrong, by parameter or file.
    """
    from inflight.batch_manager import GptManager
    from inflight.core.scheduler import Scheduler
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer

    model = _load_fake(parameters) if parameters.fake_engine else _load_checkpoint(parameters, version_dir)
    config = _scheduler_config(parameters)
    scheduler = Scheduler(config, model.engine.limits)
    client = LocalEngineClient(
        _describe(parameters, model, config),
        lambda: manager.notify(),
        (lambda timeout_s: manager.state(timeout_s)) if parameters.enable_state_requests else None,
    )
    manager = GptManager(
        model.engine,
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        stats_period_ns=parameters.stats_check_period_ms * 1_000_000,
        on_death=client.fail_all,
        instruments=_instruments(parameters, config, model.engine.limits, return_metrics),
    )
    endpoint = EndpointServer(client, endpoint_path, client.drain, lambda timeout_s: running.close(timeout_s))
    running = RunningEngine(client, manager, endpoint)
    return running


def _scheduler_config(parameters: Parameters) -> SchedulerConfig:
    from inflight.core.config import CapacitySchedulerPolicy, SchedulerConfig

    is_static = parameters.gpt_model_type == "V1"
    return SchedulerConfig(
        policy=CapacitySchedulerPolicy.STATIC_BATCH if is_static else parameters.batch_scheduler_policy,
        max_num_tokens=parameters.max_num_tokens,
        enable_chunked_context=parameters.enable_chunked_context,
        enable_kv_cache_reuse=parameters.enable_kv_cache_reuse,
        max_beam_width=parameters.max_beam_width,
        max_queue_size=parameters.max_queue_size,
        context_chunking_policy=parameters.context_chunking_policy,
    )


def _instruments(
    parameters: Parameters,
    config: SchedulerConfig,
    limits: EngineLimits,
    return_metrics: ReturnMetricsCallback | None,
) -> Instruments:
    from inflight.batch_manager.instruments import Instruments
    from inflight.batch_manager.recording import JsonRecorder
    from inflight.batch_manager.statistics_rings import StatisticsRings
    from inflight.batch_manager.watchdog import Watchdog
    from inflight.triton.memory import measure_memory

    timeout_ms, path = parameters.watchdog_timeout_ms, parameters.record_path
    return Instruments(
        recorder=JsonRecorder(path, config, limits) if path else None,
        watchdog=Watchdog(timeout_ms / 1000) if timeout_ms else None,
        rings=StatisticsRings(parameters.iter_stats_max_iterations, parameters.request_stats_max_iterations),
        return_metrics=return_metrics,
        measure_memory=measure_memory,
    )


def _load_checkpoint(parameters: Parameters, version_dir: str) -> LoadedModel:
    from inflight.engine.torch import TorchEngine, TorchEngineConfig

    model_path = parameters.gpt_model_path or str(Path(version_dir) / DEMO_MODEL)
    engine = TorchEngine.load(
        TorchEngineConfig(
            model_path=model_path,
            dtype=parameters.dtype,
            max_num_sequences=parameters.max_num_sequences,
            max_num_tokens=parameters.max_num_tokens,
            max_sequence_length=parameters.max_sequence_length,
            tokens_per_block=parameters.tokens_per_block,
            max_tokens_in_paged_kv_cache=parameters.max_tokens_in_paged_kv_cache,
            kv_cache_free_gpu_mem_fraction=parameters.kv_cache_free_gpu_mem_fraction,
            kv_cache_free_cpu_mem_fraction=parameters.kv_cache_free_cpu_mem_fraction,
            num_threads=parameters.engine_threads,
            attention_windows=parameters.max_attention_window_size,
            sink_token_length=parameters.sink_token_length,
        )
    )
    # A checkpoint may name an end id that its vocabulary does not have: no request can ever produce it.
    end_ids = tuple(token_id for token_id in engine.eos_token_ids if token_id < engine.limits.vocab_size)
    return LoadedModel(engine, model_path, engine.dtype, end_ids)


def _load_fake(parameters: Parameters) -> LoadedModel:
    """An engine without a model, for tests and for measuring everything around a forward pass."""
    from inflight.core.batch import EngineLimits
    from inflight.testing.fake_engine import FakeEngine

    vocab_size, step_us = _parse_fake(parameters.fake_engine or "")
    max_sequence_length = parameters.max_sequence_length or 4096
    size = parameters.tokens_per_block
    num_tokens = parameters.max_tokens_in_paged_kv_cache or parameters.max_num_sequences * max_sequence_length
    limits = EngineLimits(
        vocab_size, max_sequence_length, parameters.max_num_sequences, max(1, num_tokens // size), size
    )
    _log.warning("fake_engine is set: tokens are made up, no model is loaded")
    return LoadedModel(FakeEngine(limits, step_us * 1e-6, attend_to_all=False), "", "none", ())


def _parse_fake(text: str) -> tuple[int, int]:
    """(vocab_size, microseconds per step) from "vocab=1000,step_us=200"."""
    values = {"vocab": 1000, "step_us": 0}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in values or not value.strip().isdigit():
            raise ConfigError(f"fake_engine: got {text!r}, expected vocab=N,step_us=N")
        values[key.strip()] = int(value)
    return values["vocab"], values["step_us"]


def _describe(parameters: Parameters, model: LoadedModel, config: SchedulerConfig) -> EngineDescription:
    from inflight.core.description import EngineDescription

    beside_weights = Path(model.model_path) / "tokenizer.json"
    found = model.model_path if model.model_path and beside_weights.is_file() else ""
    return EngineDescription(
        limits=config.model_limits(model.engine.limits),
        model_path=model.model_path,
        tokenizer_dir=parameters.tokenizer_dir or found,
        eos_token_ids=model.eos_token_ids,
        default_end_ids=parameters.default_end_ids,
        exclude_input_from_output=bool(parameters.exclude_input_in_output),
        dtype=model.dtype,
        state_enabled=parameters.enable_state_requests,
    )
