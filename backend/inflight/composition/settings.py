"""What config.pbtxt's parameters mean to the scheduler, to what watches the loop, and to front ends.

Imports the parts lazily, as the factory does. Plain functions; on the thread that loads the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inflight.errors import ConfigError
from inflight.file_names import native

if TYPE_CHECKING:
    from inflight.batch_manager.instruments import Instruments
    from inflight.composition.models import LoadedModel
    from inflight.config import Parameters
    from inflight.core.ports import ReturnMetricsCallback
    from inflight.core.request.request import EngineDescription
    from inflight.core.schedule.batch import EngineLimits
    from inflight.core.schedule.config import SchedulerConfig


def check_parameters(parameters: Parameters) -> None:
    """Raise ConfigError where these parameters do not go together, whatever the checkpoint is.

    For whoever has to give something up before an engine can be built.
    """
    scheduler_config(parameters).validate(parameters.max_num_sequences, parameters.tokens_per_block)
    if parameters.fake_engine:
        parse_fake(parameters.fake_engine)


def scheduler_config(parameters: Parameters) -> SchedulerConfig:
    """The same on all ranks."""
    from inflight.core.schedule.config import CapacitySchedulerPolicy, SchedulerConfig

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


def instruments(
    parameters: Parameters,
    config: SchedulerConfig,
    limits: EngineLimits,
    return_metrics: ReturnMetricsCallback | None,
) -> Instruments:
    """Of the loop that faces clients."""
    from inflight.batch_manager.instruments import Instruments, StatisticsRings, Watchdog
    from inflight.batch_manager.recording import JsonRecorder
    from inflight.serving.memory import measure_memory

    timeout_ms, path = parameters.watchdog_timeout_ms, parameters.record_path
    return Instruments(
        recorder=JsonRecorder(path, config, limits) if path else None,
        watchdog=Watchdog(timeout_ms / 1000) if timeout_ms else None,
        rings=StatisticsRings(parameters.iter_stats_max_iterations, parameters.request_stats_max_iterations),
        return_metrics=return_metrics,
        measure_memory=measure_memory,
    )


def parse_fake(text: str) -> tuple[int, int]:
    """(vocab_size, microseconds per step) from "vocab=1000,step_us=200"."""
    values = {"vocab": 1000, "step_us": 0}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in values or not value.strip().isdigit():
            raise ConfigError(f"fake_engine: got {text!r}, expected vocab=N,step_us=N")
        values[key.strip()] = int(value)
    return values["vocab"], values["step_us"]


def describe(parameters: Parameters, model: LoadedModel, config: SchedulerConfig) -> EngineDescription:
    """What front ends are told."""
    from inflight.core.request.request import EngineDescription

    beside_weights = Path(native(model.model_path)) / "tokenizer.json"
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
