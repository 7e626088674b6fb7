"""Loads a folder of plans into a runner, after checking it against the configuration.

A mismatch is reported in one sentence, before slow steps. Runs on the thread that loads the model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  bare PathLike

from inflight.engine.adapter_pool import page_bytes
from inflight.engine.capacity import count_adapter_pages, count_blocks
from inflight.engine.collectives import Collectives
from inflight.engine.cuda.iteration_graphs import RecordedKinds
from inflight.engine.cuda.row_kernels import find_row_kernels
from inflight.engine.load_options import LoadOptions
from inflight.engine.memory import allocating
from inflight.engine.rank_loader import RankLoader, prepare_device
from inflight.engine.runner import ModelRunner
from inflight.engine.tensorrt.checks import (
    check_digest,
    check_model,
    check_processor,
    check_settings,
    count_row_blocks,
    find_folder,
    find_runtime,
    longest_of_plans,
    plan_rank,
    read_sidecar,
    with_adapter_limits,
)
from inflight.engine.tensorrt.decoder import TensorRtDecoder
from inflight.engine.tensorrt.row_cache import RowCache, row_bytes
from inflight.engine.tensorrt.runtime import LoadedPlan, Runtime
from inflight.engine.tensorrt.sidecar import Sidecar
from inflight.models.registry import read_model_description

_logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_runner(options: LoadOptions) -> ModelRunner:
    """Load one rank's plans and allocate its KV cache.

    Raises:
        ConfigError: The plans, a GPU or TensorRT are missing, or the plans do not fit the configuration.
    """
    config, min_over_ranks = options.config, options.min_over_ranks
    device = prepare_device(config)
    folder = find_folder(config)
    sidecar = read_sidecar(folder, plan_rank(options.mapping))
    model = read_model_description(str(config.gpt_model_path))
    check_settings(config, sidecar, options.mapping, folder)
    max_sequence_length = longest_of_plans(config, sidecar, model.decoder)
    check_model(config, sidecar, model.decoder, folder)
    config = with_adapter_limits(config, sidecar)
    loader = RankLoader(replace(options, config=config), model.decoder, max_sequence_length, device)
    layers, head = _load_plans(sidecar, folder, device, options.collectives)

    dtype: torch.dtype = getattr(torch, sidecar.settings.dtype)
    num_adapter_pages = count_adapter_pages(config, loader.held, dtype, device, min_over_ranks)
    capture = loader.find_graphs(TensorRtDecoder.has_fixed_shapes)
    cache = _allocate(loader, sidecar, num_adapter_pages, capture is not None)
    row_kernels = find_row_kernels(model.decoder.vocab_size, device)
    decoder = TensorRtDecoder(
        model.decoder, loader.part, sidecar.settings, layers, head, cache, options.collectives, row_kernels
    )
    if num_adapter_pages:
        decoder.reserve_adapters(num_adapter_pages, config.lora_cache_optimal_adapter_size)
    runner = loader.make_runner(
        decoder,
        cache,
        num_adapter_pages,
        capture,
        config.shares_blocks,
        has_bidirectional_attention=False,
    )
    _warn(sidecar)
    return runner


def _warn(sidecar: Sidecar) -> None:
    """Log that the authors have not run plans on real hardware yet."""
    _logger.warning(
        "engine is tensorrt (%s %s): its authors had no GPU that runs plans, so nothing but a stand-in for "
        "TensorRT has run it; compare its answers with those of the engine torch before you rely on them",
        sidecar.module,
        sidecar.module_version,
    )


def _load_plans(
    sidecar: Sidecar, folder: Path, device: torch.device, collectives: Collectives
) -> tuple[LoadedPlan, LoadedPlan]:
    """Load the plans of layers and head, and bind weights that are inputs."""
    module = find_runtime(sidecar, folder)
    check_processor(sidecar, folder, device)
    for file in (sidecar.layers.file, sidecar.head.file, sidecar.weights):
        if file is not None:
            check_digest(folder, file)
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


def _allocate(loader: RankLoader, sidecar: Sidecar, num_adapter_pages: int, is_recorded: bool) -> RowCache:
    """Allocate the slots' rows, and KV blocks in the remaining memory."""
    config, held, device = loader.config, loader.held, loader.device
    min_over_ranks = loader.options.min_over_ranks
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
        num_blocks = count_blocks(
            config, held, loader.max_sequence_length, dtype, device, reserved, min_over_ranks
        )
    else:
        num_blocks = min_over_ranks(count_row_blocks(config, loader.max_sequence_length))
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
