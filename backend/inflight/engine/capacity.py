"""The capacity and limits of an engine on torch's tensors: lengths, blocks, adapter pages, threads.

Used while a model is loaded, for every implementation of its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from inflight.additional_outputs import OfferedOutput
from inflight.config import EngineConfig
from inflight.core.schedule.batch import EngineLimits
from inflight.engine.adapter_pool import page_bytes
from inflight.engine.additional_outputs import offer
from inflight.engine.kv_cache import block_bytes, describe_quantization
from inflight.engine.kv_quantization import find_kv_quantization
from inflight.engine.memory import (
    LESS_STATES,
    allocating,
    beside_mapped,
    check_adapter_pages,
    choose_kv_cache_size,
    choose_num_adapter_pages,
    free_memory,
    largest_adapter_pages,
)
from inflight.engine.recurrent.states import RecurrentStates, state_bytes
from inflight.errors import ConfigError
from inflight.models import DecoderConfig
from inflight.models.sharding import Part
from inflight.processors import Processors
from inflight.ranks.topology import Mapping

_logger = logging.getLogger(__name__)

_BREAK_EVEN_ROWS = {"cpu": 16, "cuda": 256}
"""`EngineLimits.break_even_rows` by type of device, roughly."""


def find_device(name: str | None) -> torch.device:
    """Return the device that the parameter `device` names; None: a GPU if there is one, otherwise the CPU.

    Raises ConfigError if the machine does not have the device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            f"device is {name!r}, which this machine does not have or this engine does not run on"
        )
    return device


def default_threads() -> int:
    """Return the number of threads of a forward pass on the CPU: torch's default, limited to the processors
    that this process may use."""
    return min(torch.get_num_threads(), Processors.here().num_threads)


def set_threads(engine_threads: int | None) -> None:
    """Set the number of threads of torch and of compiled layers; None: `default_threads`."""
    num_threads = engine_threads or default_threads()
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    processors = Processors.here()
    if num_threads > max(1, processors.capacity):
        _logger.warning(
            "engine_threads is %d, but this process may use %s: more threads than processors slow each other down",
            num_threads,
            processors,
        )
    else:
        _logger.info("%d threads on the CPU: %s", num_threads, processors)


def offer_outputs(
    config: EngineConfig, decoder: DecoderConfig, mapping: Mapping
) -> tuple[OfferedOutput, ...]:
    """Return the additional outputs that requests may ask for. All ranks get the same result or ConfigError."""
    last_stage = Part.from_mapping(replace(mapping, rank=mapping.sampler), decoder)
    return offer(
        config.additional_model_outputs,
        decoder.num_layers,
        decoder.hidden_size,
        decoder.vocab_size,
        last_stage.layers[0],
    )


def count_adapter_pages(
    config: EngineConfig,
    held: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    min_over_ranks: Callable[[int], int],
) -> int:
    """Return the number of adapter pages that fit beside the weights; raises ConfigError if a configured size is
    too small."""
    if config.lora_cache_gpu_memory_fraction == 0:
        return 0
    page_rank = config.lora_cache_optimal_adapter_size
    size = page_bytes(held, page_rank, dtype)
    free_bytes = free_memory(device) // (1 if device.type == "cuda" else config.ranks_on_host)
    num_pages = check_adapter_pages(
        config, min_over_ranks(choose_num_adapter_pages(config, size, free_bytes)), size
    )
    largest = config.lora_cache_max_adapter_size
    if num_pages:
        _logger.info(
            "LoRA adapters: %d pages of %d ranks, %.1f MiB, enough for %d adapters of rank %d, the maximum",
            num_pages,
            page_rank,
            num_pages * size / 2**20,
            num_pages // largest_adapter_pages(config),
            largest,
        )
    else:
        _logger.warning("LoRA adapters are not accepted: there is no memory for one of rank %d", largest)
    return num_pages


def count_blocks(
    config: EngineConfig,
    decoder: DecoderConfig,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    reserved: int,
    min_over_ranks: Callable[[int], int],
    mapped: int = 0,
) -> int:
    """Return the number of blocks of the KV cache.

    `reserved` bytes are left for later allocations on the device, and `mapped` bytes for mapped weights.
    """
    on_gpu = device.type == "cuda"
    quantization = find_kv_quantization(config.kv_cache_dtype)
    size = block_bytes(decoder, config.tokens_per_block, dtype, quantization)
    free_bytes = max(0, free_memory(device) - reserved) // (1 if on_gpu else config.ranks_on_host)
    free_bytes = beside_mapped(free_bytes, mapped)
    chosen = choose_kv_cache_size(config, max_sequence_length, size, free_bytes, on_gpu)
    num_blocks = min_over_ranks(chosen.num_blocks)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB%s; %s decides",
        num_blocks,
        config.tokens_per_block,
        num_blocks * size / 2**20,
        "" if quantization is None else f", {describe_quantization(decoder, quantization)}",
        chosen.decided_by if num_blocks == chosen.num_blocks else "another rank",
    )
    return num_blocks


def make_limits(
    config: EngineConfig,
    decoder: DecoderConfig,
    max_sequence_length: int,
    num_blocks: int,
    num_adapter_pages: int,
    device: torch.device,
    mapping: Mapping,
    num_state_snapshots: int = 0,
) -> EngineLimits:
    """Return the limits that an engine on torch's tensors declares, except its additional outputs."""
    return EngineLimits(
        vocab_size=decoder.vocab_size,
        max_sequence_length=max_sequence_length,
        max_num_sequences=config.max_num_sequences,
        num_blocks=num_blocks,
        tokens_per_block=config.tokens_per_block,
        num_micro_batches=mapping.pp_size,
        overlaps_iterations=device.type == "cuda" and mapping.world_size == 1,
        takes_all_processors=device.type == "cpu" and torch.get_num_threads() >= Processors.here().capacity,
        hidden_size=decoder.hidden_size,
        num_added_layers=decoder.num_added_layers,
        rotary_dim=decoder.multimodal_rotary_dim,
        has_spans=any(decoder.bidirectional_layers),
        num_adapter_pages=num_adapter_pages,
        adapter_page_rank=config.lora_cache_optimal_adapter_size,
        max_adapter_rank=config.lora_cache_max_adapter_size if num_adapter_pages else 0,
        has_state=decoder.recurrent is not None,
        break_even_rows=_BREAK_EVEN_ROWS[device.type],
        num_state_snapshots=num_state_snapshots,
    )


def allocate_states(
    config: EngineConfig, held: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> RecurrentStates | None:
    """Allocate the recurrent states and their snapshots; None for a model or stage without recurrent layers."""
    num_layers = sum(held.recurrent_layers)
    if held.recurrent is None or not num_layers:
        return None
    num_slots, num_snapshots = config.max_num_sequences, count_snapshots(config, held)
    num_bytes = state_bytes(held.recurrent, num_layers, dtype)
    total = total_state_bytes(config, held, dtype)
    with allocating("recurrent states", lambda: total, device, LESS_STATES):
        states = RecurrentStates(held.recurrent, num_layers, num_slots, num_snapshots, dtype, device)
    _logger.info(
        "recurrent states: %d slots and %d snapshots of %.2f MiB", num_slots, num_snapshots, num_bytes / 2**20
    )
    return states


def total_state_bytes(config: EngineConfig, held: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the size of the recurrent states of all slots and of their snapshots in bytes."""
    if held.recurrent is None:
        return 0
    num_states = config.max_num_sequences + 1 + count_snapshots(config, held)
    return num_states * state_bytes(held.recurrent, sum(held.recurrent_layers), dtype)


def count_snapshots(config: EngineConfig, decoder: DecoderConfig) -> int:
    """Return the number of snapshots of recurrent states; 0 for a model without recurrent layers."""
    if decoder.recurrent is None:
        return 0
    wanted = config.recurrent_state_snapshots
    return 2 * config.max_num_sequences if wanted is None else wanted
