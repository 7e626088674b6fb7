"""The parts of a running engine beside its model and its loop, made from the parameters.

They are the store of saved KV blocks, the adapters, the receipts, the compiler of guides, the tracer, the
instruments, and the description for front ends. `build` connects them. Parts are imported lazily, inside
functions, so that a front end without an engine never imports torch. Called once, on the thread that loads the
model.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inflight.errors import ConfigError, InvalidArgument, Unavailable
from inflight.file_names import native

if TYPE_CHECKING:
    from inflight.adapters.commands import AdapterCommands
    from inflight.batch_manager.instruments import Instruments
    from inflight.batch_manager.kv_event_publisher import KvEventPublisher
    from inflight.batch_manager.watchdog import Watchdog
    from inflight.block_store import BlockMemory, HostBlockStore
    from inflight.config import Parameters, SchedulingConfig
    from inflight.core.ports import BlockStore, Engine, ReturnMetricsCallback
    from inflight.core.request.engine_description import EngineDescription
    from inflight.core.schedule.batch import EngineLimits
    from inflight.guided.compiler import ChildCompiler
    from inflight.load_model import LoadedModel
    from inflight.model_memory import ReloadedModel
    from inflight.parameter_spec import KvEventsConfig
    from inflight.ranks.rank_context import RankContext
    from inflight.receipts.engine_part import EngineReceipts
    from inflight.tracing import Tracer

_OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "INFLIGHT_CPU_TARGET", "INFLIGHT_CPU_BUILD")
"""The environment variables that decide which device and which code compute KV blocks."""

_OF_PLACES = frozenset({"gpu_device_ids", "launch_mode", "mpirun_arguments"})
"""The parameters that decide where ranks run, and so on which devices."""

_NOT_OF_BLOCKS = frozenset(
    {
        *("gpt_model_path", "tensorrt_engine_dir"),  # the content of these folders counts, not their names
        *("kv_cache_free_cpu_mem_fraction", "kv_cache_free_gpu_mem_fraction", "kv_cache_host_memory_bytes"),
        *("max_tokens_in_paged_kv_cache", "max_sequence_length", "engine_threads", "normalize_log_probs"),
    }
)
"""The engine's parameters on which neither the content of KV blocks depends nor the code that computes them."""

OnHang: TypeAlias = "Callable[[Unavailable], None]"


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
    parameters: Parameters,
    model: LoadedModel,
    notify: Callable[[], None],
    rank: int = 0,
    num_ranks: int = 1,
) -> HostBlockStore | None:
    """Return the store of KV blocks in host memory and files; None if blocks are not saved (`saves_blocks`).

    With several ranks, it has this rank's part of the blocks. Raises ConfigError if the folder cannot be used.
    """
    folder, memory = parameters.kv_cache_dir, model.block_memory
    if memory is None or not saves_blocks(parameters, model):
        return None
    if not memory.block_bytes or (model.engine.limits.num_state_snapshots and not memory.state_bytes):
        kind = "recurrent" if memory.block_bytes else "attention"
        raise ConfigError(
            f"KV blocks cannot be saved, because the model, or one of its pipeline stages, has no {kind} layer; "
            f"pipeline_parallel_size is {parameters.pipeline_parallel_size}"
        )
    from inflight.block_store import BlockFiles, HostBlockStore, cache_identity
    from inflight.receipts.engine_part import given_parameters, versions

    files = None
    if folder is not None:
        settings = versions() | given_parameters(parameters) | asdict(model.code)
        settings |= {"dtype": model.dtype, "sizes": (memory.block_bytes, memory.state_bytes)}
        settings |= {} if num_ranks == 1 else {"rank": f"{rank} of {num_ranks}"}
        identity = cache_identity(_cached_folders(parameters, native(model.model_path)), settings)
        files = BlockFiles(
            Path(native(folder)),
            identity,
            max(memory.block_bytes, memory.state_bytes),
            parameters.kv_cache_disk_bytes,
            parameters.kv_cache_max_age_s,
            num_ranks=num_ranks,
            label=label_of_blocks(parameters, native(model.model_path)),
        )
    host_bytes = _host_tier_bytes(parameters, model)
    tokens_per_block = model.engine.limits.tokens_per_block
    return HostBlockStore(memory, tokens_per_block, notify, host_bytes, files, always_loads=num_ranks > 1)


def label_of_blocks(parameters: Parameters, model_path: str) -> str:
    """Return a digest of all that the identity of saved KV blocks depends on, and of a little more.

    It is known before the model is loaded. If the labels of two servers are equal, so are the identities.
    Parameters that surely do not change the identity are left out, so that most servers with equal identities have
    equal labels.

    Args:
        parameters: The engine's parameters.
        model_path: The checkpoint's folder.

    Raises:
        OSError: A file cannot be read.
    """
    from inflight.block_store import cache_identity
    from inflight.parameter_spec import declared_rows
    from inflight.receipts.engine_part import PARAMETERS, versions

    facts: dict[str, object] = {**versions(), "machine": platform.node()}
    facts |= {name: os.environ.get(name, "") for name in _OF_DEVICES}
    for owner in (parameters, parameters.engine):
        of_owner = {spec.key: getattr(owner, name) for name, spec in declared_rows(type(owner)).items()}
        wanted = (
            of_owner.keys() - _NOT_OF_BLOCKS if owner is parameters.engine else {*PARAMETERS, *_OF_PLACES}
        )
        facts |= {key: value for key, value in of_owner.items() if key in wanted}
    facts["has_draft_head"] = parameters.engine.has_draft_head
    return cache_identity(_cached_folders(parameters, model_path), facts)


def _cached_folders(parameters: Parameters, model_path: str) -> dict[str, Path]:
    """Return the folders with the files on which the content of KV blocks depends."""
    from inflight.receipts.engine_part import model_folders

    folders, head = model_folders(parameters, model_path), parameters.engine.draft_head_dir
    # The head's keys and values, or hidden states, are in the blocks too.
    return folders if head is None else folders | {"speculative_model_dir/": Path(native(head))}


def share_block_store(
    parameters: Parameters, model: LoadedModel, notify: Callable[[], None], rank_context: RankContext
) -> BlockStore | None:
    """Return the store of KV blocks for the loop of one of several ranks; None if blocks are not saved.

    Called on all ranks at the same time. Raises ConfigError on all of them if one cannot use its folder.
    """
    if not saves_blocks(parameters, model):
        return None
    world = rank_context.world
    own: list[HostBlockStore] = []

    def make(on_end: Callable[[], None]) -> HostBlockStore:
        store = make_block_store(parameters, model, on_end, world.rank, world.size)
        assert store is not None, "blocks are saved"
        own.append(store)
        return store

    shared = rank_context.share_block_store(make, notify)
    own[0].make_room()  # now that all ranks have locked their files
    return shared


def make_receipts(parameters: Parameters, model: LoadedModel, notify: Callable[[], None]) -> EngineReceipts:
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


def make_guide_compiler(
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


def describe(parameters: Parameters, model: LoadedModel) -> EngineDescription:
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
        sleep_enabled=parameters.enable_sleep_mode,
    )


def make_model_memory(
    parameters: Parameters,
    model: LoadedModel,
    load: Callable[[Parameters], LoadedModel] | None,
    close_engine: Callable[[bool], None],
    replace_engine: Callable[[Engine], None],
    use_blocks: Callable[[BlockMemory | None], None],
) -> ReloadedModel | None:
    """Return what gives back the model's memory and loads it again; None if the engine may not sleep.

    Raises ConfigError if the engine could not sleep.

    Args:
        parameters: The parameters from config.pbtxt.
        model: The loaded model.
        load: Loads the model with other parameters; None with several ranks.
        close_engine, replace_engine, use_blocks: See `ReloadedModel`.
    """
    if not parameters.enable_sleep_mode:
        return None
    for hindrance, holds in (
        ("several ranks", load is None),
        ("debug tensors", model.debug_tensors is not None),
    ):
        if holds:
            raise ConfigError(f"enable_sleep_mode is true, but an engine with {hindrance} cannot sleep")
    assert load is not None, "checked"
    from inflight.model_memory import ReloadedModel, with_same_memory
    from inflight.receipts.engine_part import model_folders
    from inflight.receipts.model_files import ModelFiles

    limits = model.engine.limits
    return ReloadedModel(
        limits,
        model.code,
        ModelFiles(model_folders(parameters, native(model.model_path))),
        close_engine,
        replace_engine,
        use_blocks,
        lambda: load(with_same_memory(parameters, limits)),
        model.keep_cache,
    )


def make_tracer(parameters: Parameters) -> Tracer | None:
    """Return the tracer; None if spans are sent nowhere. Raises ConfigError if the endpoint is not a URL."""
    if parameters.otlp_traces_endpoint is None:
        return None
    from inflight.tracing import Tracer

    return Tracer(parameters.otlp_traces_endpoint)


def with_saved_blocks(parameters: Parameters, model: LoadedModel) -> Parameters:
    """Return the parameters, with the scheduler's flag for saved KV blocks. Raises as `saves_blocks` does."""
    return replace(
        parameters, scheduler=replace(parameters.scheduler, has_block_store=saves_blocks(parameters, model))
    )


def with_kv_events(parameters: Parameters) -> SchedulingConfig:
    """Return the scheduler's part of the parameters, with room for the events of an iteration if they are
    published."""
    config, found = parameters.kv_events_config, parameters.scheduler
    if config is None:
        return found
    return replace(found, kv_event_buffer_size=max(found.kv_event_buffer_size, config.max_queue_size))


def make_instruments(
    parameters: Parameters,
    model: LoadedModel,
    return_metrics: ReturnMetricsCallback | None,
    on_hang: OnHang | None,
) -> Instruments:
    """Return the instruments of rank 0's loop. Raises ConfigError if the KV events cannot be published."""
    from inflight.batch_manager.instruments import Instruments
    from inflight.batch_manager.kv_event_buffer import KvEventBuffer
    from inflight.batch_manager.recording import JsonRecorder
    from inflight.batch_manager.statistics_rings import StatisticsRings
    from inflight.serving.memory import measure_memory

    limits, memory = model.engine.limits, model.block_memory
    path, config = parameters.record_path, parameters.kv_events_config
    num_events = parameters.scheduler.kv_event_buffer_size
    return Instruments(
        recorder=JsonRecorder(path, parameters.scheduler, limits) if path else None,
        watchdog=make_watchdog(parameters, on_hang),
        rings=StatisticsRings(
            parameters.iter_stats_max_iterations,
            parameters.request_stats_max_iterations,
            block_bytes=0 if memory is None else memory.block_bytes,
        ),
        kv_events=KvEventBuffer(num_events) if num_events else None,
        kv_publisher=None if config is None else _make_kv_publisher(config, parameters, limits),
        return_metrics=return_metrics,
        measure_memory=measure_memory,
    )


def _make_kv_publisher(
    config: KvEventsConfig, parameters: Parameters, limits: EngineLimits
) -> KvEventPublisher:
    """Return the publisher of KV cache events.

    Raises ConfigError if no block can be found again, or an address of `config` cannot be used.
    """
    from inflight.batch_manager.kv_event_publisher import KvEventPublisher

    if not parameters.scheduler.enable_kv_cache_reuse:
        raise ConfigError(
            "kv_events_config is given, but enable_kv_cache_reuse is false, so no request would find a KV block"
        )
    saved = "CPU" if parameters.kv_cache_dir is None else "DISK"
    return KvEventPublisher(config, limits.tokens_per_block, saved)


def make_watchdog(parameters: Parameters, on_hang: OnHang | None) -> Watchdog | None:
    """Return the watchdog over the loop's iterations; None if no time limit is set.

    Args:
        parameters: The parameters from config.pbtxt.
        on_hang: Called once if an iteration exceeds `hang_timeout_ms`; None: only slow iterations are reported.
    """
    from inflight.batch_manager.watchdog import Watchdog

    stuck_ms, hang_ms = parameters.watchdog_timeout_ms, parameters.hang_timeout_ms
    if on_hang is None or not hang_ms:
        return Watchdog(stuck_ms / 1000) if stuck_ms else None

    def report_hang(line: str) -> None:
        on_hang(Unavailable(f"the engine hangs, and ends (hang_timeout_ms): {line}"))

    return Watchdog((stuck_ms or hang_ms) / 1000, hang_timeout_s=hang_ms / 1000, on_hang=report_hang)
