"""Checks of the configuration against the plans, before slow steps; each check has its own error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inflight.config import EngineConfig
from inflight.engine.sequence_length import longest_sequence
from inflight.engine.tensorrt.module import find_module, module_version
from inflight.engine.tensorrt.sidecar import File, Sidecar, checkpoint_digest, file_digest, sidecar_name
from inflight.engine.windows import layer_windows
from inflight.engine_folder import is_engine_folder
from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.models import DecoderConfig
from inflight.models.rope_config import LongRopeScaling
from inflight.ranks.topology import Mapping

_HOPPER = 90


def find_folder(config: EngineConfig) -> Path:
    """Return the folder of the plans.

    Raises ConfigError if the folder is missing, or is not an engine folder.
    """
    folder = Path(native(str(config.engine_dir or config.gpt_model_path)))
    if not is_engine_folder(folder):
        raise ConfigError(
            f"engine is tensorrt, and {folder} has no {sidecar_name(0)}, expected a folder that scripts/build "
            "wrote"
        )
    return folder


def plan_rank(mapping: Mapping) -> int:
    """Return the rank whose plans this rank loads. Raises ConfigError for parallelism that plans do not have."""
    if mapping.pp_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {mapping.pp_size}, expected 1: plans have all layers, and --tp divides "
            "them"
        )
    if mapping.moe_ep_size > 1:
        raise ConfigError(
            f"moe_expert_parallel_size is {mapping.moe_ep_size}, expected 1: plans have a slice of every expert"
        )
    return mapping.tp_rank


def read_sidecar(folder: Path, rank: int) -> Sidecar:
    """Read the sidecar of a rank's plans.

    Raises ConfigError if the sidecar belongs to another rank, or to another build than rank 0's sidecar.
    """
    path, first = folder / sidecar_name(rank), Sidecar.read(folder / sidecar_name(0))
    if rank >= first.settings.tensor_parallel_size:
        return first  # `check_settings` reports that there are fewer ranks
    sidecar = Sidecar.read(path)
    if sidecar.rank != rank:
        raise ConfigError(f"{path} describes the plans of rank {sidecar.rank}, expected rank {rank}")
    for name in ("checkpoint_digest", "settings", "module_version"):
        if getattr(sidecar, name) != getattr(first, name):
            raise ConfigError(
                f"{path} is of another build than {sidecar_name(0)}, their {name} differ: build the engine again"
            )
    return sidecar


def check_settings(config: EngineConfig, sidecar: Sidecar, mapping: Mapping, folder: Path) -> None:
    """Raise ConfigError if the configuration asks for something that the plans were not built for."""
    built = sidecar.settings
    rebuild = "or build the engine again"
    if built.tensor_parallel_size != mapping.tp_size:
        raise ConfigError(
            f"tensor_parallel_size is {mapping.tp_size}, but the plans of {folder} are for "
            f"{built.tensor_parallel_size}: set that, {rebuild}"
        )
    if config.dtype not in (None, built.weight_dtype):
        raise ConfigError(
            f"dtype is {config.dtype}, but the plans of {folder} are of {built.weight_dtype}: leave it out, "
            f"{rebuild}"
        )
    if config.max_num_sequences > built.max_batch_size:
        raise ConfigError(
            f"max_batch_size is {config.max_num_sequences}, but the plans of {folder} have {built.max_batch_size} "
            f"slots: lower it, {rebuild}"
        )
    if config.kernels == "native":
        raise ConfigError("kernels is native, expected torch or no value with the engine tensorrt")
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, expected auto with the engine tensorrt, whose caches are "
            "of the dtype of activations"
        )
    for output in config.additional_model_outputs:
        name = output.name
        is_between = name.startswith("hidden_states_") and name not in built.additional_outputs
        if is_between and name != f"hidden_states_{sidecar.model.num_layers}":
            has = ", ".join(built.additional_outputs) or "none"
            raise ConfigError(
                f"additional_model_outputs has {name}, but the plans of {folder} give {has}: leave it out, "
                f"{rebuild}"
            )


def check_model(config: EngineConfig, sidecar: Sidecar, decoder: DecoderConfig, folder: Path) -> None:
    """Raise ConfigError if the plans were built from another checkpoint, or with other windows."""
    checkpoint = Path(native(str(config.gpt_model_path)))
    if is_engine_folder(checkpoint):
        found = Sidecar.read(checkpoint / sidecar_name(0)).checkpoint_digest
    else:
        found = checkpoint_digest(checkpoint)
    if found != sidecar.checkpoint_digest:
        raise ConfigError(
            f"the plans of {folder} were built from another checkpoint than {checkpoint}: name the one that they "
            "were built from, or build the engine again"
        )
    for name in ("num_layers", "hidden_size", "head_dim", "vocab_size"):
        if (configured := getattr(decoder, name)) != (built := getattr(sidecar.model, name)):
            raise ConfigError(
                f"{checkpoint / 'config.json'} has a {name} of {configured}, but the plans of {folder} have "
                f"{built}: it was changed; build the engine again"
            )
    windows = layer_windows(
        decoder.sliding_windows,
        config.max_attention_window_size,
        config.sink_token_length,
        sidecar.settings.max_seq_len,
    )
    seen = tuple(window and (window.recent if not window.sinks else window) for window in windows)
    if seen != sidecar.model.sliding_windows:
        raise ConfigError(
            "max_attention_window_size and sink_token_length cannot change the windows of plans: leave them out"
        )


def longest_of_plans(config: EngineConfig, sidecar: Sidecar, decoder: DecoderConfig) -> int:
    """Return the maximum sequence length in tokens.

    Raises ConfigError if the configured length exceeds the plans' slots.
    """
    room = sidecar.settings.max_seq_len
    if config.max_sequence_length is not None and config.max_sequence_length > room:
        raise ConfigError(
            f"max_sequence_length is {config.max_sequence_length}, but the plans' slots have room for {room} "
            "tokens: lower it, or build the engine again"
        )
    longest = min(room, longest_sequence(config, decoder))
    for rope in decoder.ropes:
        scaling = None if rope is None else rope.scaling
        if isinstance(scaling, LongRopeScaling) and longest <= scaling.original_max_positions < room:
            raise ConfigError(
                f"max_sequence_length is {longest}, for which the model has short LongRoPE factors, but the plans "
                f"have the long ones, as their max_seq_len is {room}: leave max_sequence_length out, or build the "
                f"engine with a max_seq_len of at most {scaling.original_max_positions}"
            )
    return longest


def count_row_blocks(config: EngineConfig, max_sequence_length: int) -> int:
    """Return the number of KV blocks for the scheduler, where every slot has its own memory; raises ConfigError
    if it is less than one per slot."""
    slots, size = config.max_num_sequences, config.tokens_per_block
    wanted = config.max_tokens_in_paged_kv_cache
    in_rows = slots * -(-max_sequence_length // size)
    if wanted is None:
        return in_rows
    if wanted < slots * size:
        raise ConfigError(
            f"max_tokens_in_paged_kv_cache is {wanted}, expected at least {slots * size}: a block of {size} "
            f"tokens for each of {slots} sequences"
        )
    return min(in_rows, wanted // size)


def find_runtime(sidecar: Sidecar, folder: Path) -> Any:
    """Return the TensorRT module that built the plans. Raises ConfigError if it or its version is not
    installed."""
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


def check_processor(sidecar: Sidecar, folder: Path, device: torch.device) -> None:
    """Raise ConfigError if the plans are not for this GPU."""
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


def check_digest(folder: Path, file: File) -> None:
    """Raise ConfigError if a file does not match its digest."""
    path = folder / file.name
    try:
        found = file_digest(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}, expected what scripts/build writes") from error
    if found != file.digest:
        raise ConfigError(
            f"{path} does not match its description: it is damaged or of another build; build the engine "
            "again"
        )


def with_adapter_limits(config: EngineConfig, sidecar: Sidecar) -> EngineConfig:
    """Return the configuration with the limits of adapters, including the size of a page, reduced to the
    plans'."""
    room, wanted = sidecar.settings.max_lora_rank, config.lora_cache_gpu_memory_fraction
    if room == 0:
        if wanted:
            raise ConfigError(
                f"lora_cache_gpu_memory_fraction is {wanted}, but the plans take no adapters: leave it out, or "
                "build the engine with a max_lora_rank"
            )
        return replace(config, lora_cache_gpu_memory_fraction=0.0)
    page_rank = min(config.lora_cache_optimal_adapter_size, room)
    largest = min(config.lora_cache_max_adapter_size, room // page_rank * page_rank)
    return replace(config, lora_cache_optimal_adapter_size=page_rank, lora_cache_max_adapter_size=largest)
