"""A folder of plans → a runner: what was built is checked against what is asked for, then it is loaded.

Whatever does not go together is said before anything that takes time, in one sentence. Called on the thread that
loads the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from inflight.config import EngineConfig
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.debug_tensors import DebugTensors
from inflight.engine.engine import RowOutputs
from inflight.engine.memory import allocating
from inflight.engine.tensorrt.decoder import TensorRtDecoder
from inflight.engine.tensorrt.module import find_module, module_version
from inflight.engine.tensorrt.row_cache import RowCache, row_bytes
from inflight.engine.tensorrt.runtime import LoadedPlan, Runtime
from inflight.engine.tensorrt.sidecar import File, Sidecar, checkpoint_digest, file_digest, sidecar_name
from inflight.engine.torch.adapters import page_bytes
from inflight.engine.torch.collectives import Collectives
from inflight.engine.torch.engine import TorchRunner, find_capture
from inflight.engine.torch.iteration_graphs import RecordedKinds
from inflight.engine.torch.layer_check import find_row_kernels
from inflight.engine.torch.room import (
    count_adapter_pages,
    count_blocks,
    find_device,
    longest_sequence,
    make_limits,
    offer_outputs,
)
from inflight.engine.windows import layer_windows
from inflight.engine_folder import is_engine_folder
from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.models import DecoderConfig
from inflight.models.registry import read_model_description
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping

_logger = logging.getLogger(__name__)
_HOPPER = 90


class TensorRtRunner(TorchRunner):
    """A model of plans, and everything that it remembers between iterations.

    Beside what a TorchRunner does it lets the rows of its cache hold what a batch reads.
    """

    cache: RowCache

    def run(self, batch: ScheduledBatch, hidden: torch.Tensor | None) -> RowOutputs:
        """As `Runner.run`."""
        try:
            return super().run(batch, hidden)
        except BaseException:  # whatever it is, nobody knows what is in the rows
            self.cache.forget(batch)
            raise

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        super()._prepare_blocks(batch, fresh_blocks)
        self.cache.prepare(batch, self.slots.num_tokens)


@torch.inference_mode()
def load_runner(
    config: EngineConfig,
    mapping: Mapping,
    collectives: Collectives,
    agree: Callable[[int], int],
    post_processor_names: tuple[str, ...],
) -> TensorRtRunner:
    """Read one rank's plans and allocate its KV cache; a `LoadRunner`.

    Raises:
        ConfigError: The plans, or a GPU or TensorRT to run them, are not there; or they are not for what is asked.
    """
    config.validate()
    device = find_device(config.device)
    if config.engine_threads is not None:
        torch.set_num_threads(config.engine_threads)
    folder = _find_folder(config)
    sidecar = Sidecar.read(folder / sidecar_name(_rank(mapping)))
    model = read_model_description(str(config.gpt_model_path))
    _check_settings(config, sidecar, mapping, folder)
    max_sequence_length = _longest(config, sidecar, model.decoder)
    _check_model(config, sidecar, model.decoder, folder)
    offered = offer_outputs(config, model.decoder, mapping)
    debug_tensors = DebugTensors.from_config(config, mapping.pp_rank, mapping.tp_rank)
    part = Part.from_mapping(mapping, model.decoder)
    held = part.held_config(model.decoder)
    layers, head = _load_plans(sidecar, folder, device, collectives)
    dtype: torch.dtype = getattr(torch, sidecar.settings.dtype)

    config = _with_adapter_limits(config, sidecar)
    num_adapter_pages = count_adapter_pages(config, held, dtype, device, agree)
    capture = find_capture(
        config, TensorRtDecoder.has_fixed_shapes, mapping, device, debug_tensors is not None
    )
    if device.type == "cuda" and not agree(int(capture is not None)):
        capture = None
    cache = _allocate(
        config, sidecar, held, max_sequence_length, num_adapter_pages, capture is not None, device, agree
    )
    row_kernels = find_row_kernels(model.decoder.vocab_size, device)
    decoder = TensorRtDecoder(
        model.decoder, part, sidecar.settings, layers, head, cache, collectives, row_kernels
    )
    if num_adapter_pages:
        decoder.reserve_adapters(num_adapter_pages, config.lora_cache_optimal_adapter_size)
    limits = replace(
        make_limits(
            config, model.decoder, max_sequence_length, cache.num_blocks, num_adapter_pages, device, mapping
        ),
        logits_post_processors=post_processor_names,
        additional_outputs=offered,
    )
    runner = TensorRtRunner(decoder, cache, limits, config.max_num_tokens, mapping, capture, debug_tensors)
    if device.type == "cuda" and not agree(len(runner.recorded.generation_sizes)):
        runner.drop_recordings()
    _logger.warning(
        "engine is tensorrt (%s %s): its authors had no GPU that runs plans, so nothing but a stand-in for TensorRT has "
        "run it; compare its answers with those of the engine torch before you rely on them",
        sidecar.module,
        sidecar.module_version,
    )
    return runner


def _find_folder(config: EngineConfig) -> Path:
    folder = Path(native(str(config.engine_dir or config.gpt_model_path)))
    if not is_engine_folder(folder):
        raise ConfigError(
            f"engine is tensorrt, and {folder} has no {sidecar_name(0)}, expected a folder that scripts/build wrote"
        )
    return folder


def _rank(mapping: Mapping) -> int:
    if mapping.pp_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {mapping.pp_size}, expected 1: plans have all layers, and --tp divides them"
        )
    if mapping.moe_ep_size > 1:
        raise ConfigError(
            f"moe_expert_parallel_size is {mapping.moe_ep_size}, expected 1: plans have a slice of every expert"
        )
    return mapping.tp_rank


def _check_settings(config: EngineConfig, sidecar: Sidecar, mapping: Mapping, folder: Path) -> None:
    built = sidecar.settings
    rebuild = "or build the engine again"
    if built.tensor_parallel_size != mapping.tp_size:
        raise ConfigError(
            f"tensor_parallel_size is {mapping.tp_size}, but the plans of {folder} are for "
            f"{built.tensor_parallel_size}: set that, {rebuild}"
        )
    if config.dtype not in (None, built.weight_dtype):
        raise ConfigError(
            f"dtype is {config.dtype}, but the plans of {folder} are of {built.weight_dtype}: leave it out, {rebuild}"
        )
    if config.max_num_sequences > built.max_batch_size:
        raise ConfigError(
            f"max_batch_size is {config.max_num_sequences}, but the plans of {folder} have {built.max_batch_size} "
            f"slots: lower it, {rebuild}"
        )
    if config.kernels == "native":
        raise ConfigError("kernels is native, expected torch or nothing with the engine tensorrt")
    for output in config.additional_model_outputs:
        name = output.name
        is_between = name.startswith("hidden_states_") and name not in built.additional_outputs
        if is_between and name != f"hidden_states_{sidecar.model.num_layers}":
            has = ", ".join(built.additional_outputs) or "none"
            raise ConfigError(
                f"additional_model_outputs has {name}, but the plans of {folder} give {has}: leave it out, {rebuild}"
            )


def _check_model(config: EngineConfig, sidecar: Sidecar, decoder: DecoderConfig, folder: Path) -> None:
    """ConfigError if the plans are of another checkpoint, or attend to other tokens."""
    checkpoint = Path(native(str(config.gpt_model_path)))
    if not is_engine_folder(checkpoint) and checkpoint_digest(checkpoint) != sidecar.checkpoint_digest:
        raise ConfigError(
            f"the plans of {folder} were built from another checkpoint than {checkpoint}: name the one that they "
            "were built from, or build the engine again"
        )
    windows = layer_windows(
        decoder.sliding_windows,
        config.max_attention_window_size,
        config.sink_token_length,
        sidecar.settings.max_seq_len,
    )
    asked = tuple(window and (window.recent if not window.sinks else window) for window in windows)
    if asked != sidecar.model.sliding_windows:
        raise ConfigError(
            "max_attention_window_size and sink_token_length cannot change the windows of plans: leave them out"
        )


def _longest(config: EngineConfig, sidecar: Sidecar, decoder: DecoderConfig) -> int:
    room = sidecar.settings.max_seq_len
    if config.max_sequence_length is not None and config.max_sequence_length > room:
        raise ConfigError(
            f"max_sequence_length is {config.max_sequence_length}, but the plans' slots have room for {room} tokens: "
            "lower it, or build the engine again"
        )
    return min(room, longest_sequence(config, decoder))


def _load_plans(
    sidecar: Sidecar, folder: Path, device: torch.device, collectives: Collectives
) -> tuple[LoadedPlan, LoadedPlan]:
    """The layers and the head, with the weights that are inputs bound."""
    module = _find_module(sidecar, folder)
    _check_processor(sidecar, folder, device)
    for file in (sidecar.layers.file, sidecar.head.file, sidecar.weights):
        if file is not None:
            _check_digest(folder, file)
    communicator = collectives.communicator if collectives.size > 1 else None

    def num_bytes() -> int:
        return sum((folder / plan.file.name).stat().st_size for plan in (sidecar.layers, sidecar.head))

    with allocating("the plans", num_bytes, device, "build them with fewer slots or rows, or for more ranks"):
        runtime = Runtime(module, device, communicator)
        layers, head = runtime.load(folder, sidecar.layers), runtime.load(folder, sidecar.head)
        if sidecar.weights is not None:
            tensors = load_file(folder / sidecar.weights.name, device=str(device))
            for plan in (layers, head):
                plan.bind(
                    {spec.name: tensors[spec.name] for spec in plan.spec.inputs if spec.name in tensors}
                )
    return layers, head


def _find_module(sidecar: Sidecar, folder: Path) -> Any:
    try:
        module = find_module(sidecar.module)
    except ConfigError as error:
        raise ConfigError(f"{folder} needs an NVIDIA GPU and TensorRT; {error}") from error
    if (version := module_version(module)) != sidecar.module_version:
        raise ConfigError(
            f"the plans of {folder} were built with {sidecar.module} {sidecar.module_version}, and {version} is "
            "installed: a plan runs with the version that has built it; build the engine again"
        )
    return module


def _check_processor(sidecar: Sidecar, folder: Path, device: torch.device) -> None:
    """ConfigError for a GPU that the plans are not for."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if sidecar.processors.include(10 * major + minor) and (10 * major + minor, sidecar.module) != (
        _HOPPER,
        "tensorrt_rtx",
    ):
        return
    hint = (
        "TensorRT for RTX does not run on it" if 10 * major + minor == _HOPPER else "build the engine for it"
    )
    raise ConfigError(
        f"the plans of {folder} are for GPUs of compute capability {sidecar.processors}, and this one has "
        f"{major}.{minor}: {hint}"
    )


def _check_digest(folder: Path, file: File) -> None:
    path = folder / file.name
    try:
        found = file_digest(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}, expected what scripts/build writes") from error
    if found != file.digest:
        raise ConfigError(
            f"{path} is not the file that its description is of, which another build has written: build the engine again"
        )


def _with_adapter_limits(config: EngineConfig, sidecar: Sidecar) -> EngineConfig:
    """The parameters of adapters, no larger than what the plans have room for."""
    room, page_rank = sidecar.settings.max_lora_rank, config.lora_cache_optimal_adapter_size
    wanted = config.lora_cache_gpu_memory_fraction
    if page_rank > room:
        if wanted:
            raise ConfigError(
                f"lora_cache_gpu_memory_fraction is {wanted}, but the plans have room for adapters of {room} ranks "
                f"together, and a page has {page_rank}: leave it out, or build the engine with a larger max_lora_rank"
            )
        return replace(config, lora_cache_gpu_memory_fraction=0.0)
    largest = min(config.lora_cache_max_adapter_size, room // page_rank * page_rank)
    return replace(config, lora_cache_max_adapter_size=largest)


def _allocate(
    config: EngineConfig,
    sidecar: Sidecar,
    held: DecoderConfig,
    max_sequence_length: int,
    num_adapter_pages: int,
    is_recorded: bool,
    device: torch.device,
    agree: Callable[[int], int],
) -> RowCache:
    """The rows, and blocks in the memory that is left."""
    settings, dtype = sidecar.settings, getattr(torch, sidecar.settings.dtype)
    slots, size = config.max_num_sequences, config.tokens_per_block
    of_rows = settings.max_batch_size * row_bytes(held, settings.max_seq_len, dtype)
    of_adapters = num_adapter_pages * page_bytes(held, config.lora_cache_optimal_adapter_size, dtype)
    reserved = of_rows + of_adapters
    if is_recorded:
        kinds = RecordedKinds.of(
            TensorRtDecoder.takes_fixed_rows, slots, settings.max_num_tokens, bool(num_adapter_pages)
        )
        reserved += kinds.num_bytes
    _logger.info(
        "rows of the KV cache: %d slots of %d tokens, %.0f MiB", settings.max_batch_size, settings.max_seq_len,
        of_rows / 2**20,
    )  # fmt: skip
    if config.shares_blocks:
        num_blocks = count_blocks(config, held, max_sequence_length, dtype, device, reserved, agree)
    else:
        num_blocks = agree(slots * -(-max_sequence_length // size))
        _logger.info(
            "no blocks are kept beside rows: sequences share nothing (block reuse is off, and beams are)"
        )
    mend = (
        "build the plans with fewer slots or a smaller max_seq_len, or lower kv_cache_free_gpu_mem_fraction"
    )
    with allocating("the KV cache", lambda: of_rows, device, mend):
        return RowCache(
            held,
            settings.max_batch_size,
            settings.max_seq_len,
            num_blocks,
            size,
            config.shares_blocks,
            dtype,
            device,
        )
