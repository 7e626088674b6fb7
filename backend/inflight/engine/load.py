"""Loads a model, or one rank's part of it, from a checkpoint or a folder of plans. Loading thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from inflight.config import MMAP, EngineConfig
from inflight.engine.adapter_pool import page_bytes
from inflight.engine.capacity import (
    allocate_states,
    count_adapter_pages,
    count_blocks,
    find_device,
    total_state_bytes,
)
from inflight.engine.collectives import ALONE, Collectives
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cuda.iteration_graphs import Capture, RecordedKinds
from inflight.engine.draft_costs import NO_COSTS, DraftCosts, find_draft_costs
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.engine.kv_quantization import find_kv_quantization
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.transformers_decoder import TransformersDecoder, TransformersModel
from inflight.engine.load_decoder import (
    AnyDecoder,
    computed_dtype,
    find_model,
    load_decoder,
    log_not_mapped,
    runs_compiled,
    weight_bytes,
)
from inflight.engine.load_draft_head import MakeDraftHead, load_draft_head
from inflight.engine.load_options import KeptCache, LoadOptions
from inflight.engine.memory import (
    LESS_WEIGHTS,
    LESS_WEIGHTS_OF_TRANSFORMERS,
    allocating,
    check_room,
    free_memory,
    left_by_weights,
)
from inflight.engine.rank_loader import RankLoader, prepare_device
from inflight.engine.runner import ModelRunner
from inflight.engine.sequence_length import longest_sequence
from inflight.engine.windows import layer_windows
from inflight.guided.grammars import Grammars
from inflight.models.loader import check_weights
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping
from inflight.sampling import Sampler
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors

_log = logging.getLogger(__name__)
_LESS_ADAPTERS = "lower lora_cache_gpu_memory_fraction"
_LESS_CACHE = "lower kv_cache_free_gpu_mem_fraction or max_tokens_in_paged_kv_cache"

MakeGrammars = Callable[[int], Grammars | None]


def no_grammars(vocab_size: int) -> None:
    """Return None, for an engine without guides."""


def load_engine(
    config: EngineConfig,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    make_grammars: MakeGrammars = no_grammars,
    kept: KeptCache | None = None,
) -> ModelEngine:
    """Load a whole model and allocate its KV cache.

    Args:
        config: The model and its parameters.
        processors: The logits post-processors that requests may name.
        make_grammars: Called with the vocabulary size; returns the object that follows guides.
        kept: The KV cache of an earlier engine, to use instead of a new one.

    Raises:
        ConfigError: A parameter or the checkpoint cannot be used, or there is too little memory.
    """
    runner = load_runner(LoadOptions(config, post_processor_names=processors.names, kept=kept))
    grammars = make_grammars(runner.limits.vocab_size)
    return make_engine(runner, config.normalize_log_probs, processors, grammars)


def load_stage(
    config: EngineConfig,
    mapping: Mapping,
    collectives: Collectives = ALONE,
    min_over_ranks: Callable[[int], int] = int,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    make_grammars: MakeGrammars = no_grammars,
) -> ModelRunner | ModelEngine:
    """Load one rank's part of a model and allocate its KV cache; the rank that samples gets a Sampler.

    Args:
        config: The model and its parameters.
        mapping: This rank's position among the model's ranks.
        collectives: Collectives over the ranks of this rank's pipeline stage.
        min_over_ranks: Returns the minimum of a number over all ranks. Every rank calls it with these numbers
            of its own, in this order: free memory in bytes, adapter pages, KV blocks; on a GPU also 1 if it
            records iterations, else 0, and numbers of recordings. A ConfigError that it raises fails this load
            too.
        processors: The logits post-processors that requests may name; names must be the same on all ranks.
        make_grammars: See `load_engine`; called on the rank that samples.

    Raises:
        ConfigError: See `load_engine`.
    """
    runner = load_runner(LoadOptions(config, mapping, collectives, min_over_ranks, processors.names))
    if mapping.is_sampler:
        grammars = make_grammars(runner.limits.vocab_size)
        return make_engine(runner, config.normalize_log_probs, processors, grammars)
    if mapping.is_last_stage and processors.names and processors.replicate:
        return make_engine(runner, processors=processors, chooses_tokens=False)
    return runner


@torch.inference_mode()
def make_engine(
    runner: ModelRunner,
    normalize_log_probs: bool = False,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    grammars: Grammars | None = None,
    chooses_tokens: bool = True,
) -> ModelEngine:
    """Return an engine with a runner, and with a Sampler for all of the runner's slots."""
    sampler = Sampler(
        runner.limits.max_num_sequences,
        runner.limits.max_sequence_length,
        runner.limits.vocab_size,
        runner.cache.device,
        runner.decoder.row_kernels,
        normalize_log_probs,
        processors,
        grammars,
    )
    return ModelEngine(runner, sampler, chooses_tokens)


@torch.inference_mode()
def load_runner(options: LoadOptions) -> ModelRunner:
    """Load one rank's part of a model and allocate its KV cache.

    Raises:
        ConfigError: See `load_engine`.
    """
    if options.config.implementation == "tensorrt":
        from inflight.engine.tensorrt.load import load_runner as load_plans

        log_not_mapped(options.config, "TensorRT has the weights on the GPU")
        return load_plans(options)
    device = prepare_device(options.config)
    loader = _Loader(options, _find_model(options, device), device)
    loader.check_room()
    decoder = loader.load_weights()
    make_head = loader.load_head(decoder)
    num_adapter_pages = loader.reserve_adapters(decoder)
    capture = loader.find_graphs(decoder.has_fixed_shapes)
    cache = loader.allocate_cache(decoder, num_adapter_pages, capture)
    return loader.make_runner(
        decoder,
        cache,
        num_adapter_pages,
        capture,
        draft_head=None if make_head is None else make_head(cache),
        draft_costs=loader.draft_costs(),
    )


def _find_model(options: LoadOptions, device: torch.device) -> ModelDescription | TransformersModel:
    config = options.config
    assert config.gpt_model_path is not None, "build has inserted the demo model if no path was configured"
    mend = LESS_WEIGHTS_OF_TRANSFORMERS  # nothing else reads weights here
    with allocating("the weights", partial(_stored_bytes, config), device, mend):
        model = find_model(config, device, options.mapping.world_size)
    if not isinstance(model, TransformersModel):
        check_weights(model)  # before slow steps
    return model


class _Loader(RankLoader):
    """The steps from a checkpoint to a runner, in the order in which they take device memory."""

    def __init__(
        self, options: LoadOptions, model: ModelDescription | TransformersModel, device: torch.device
    ) -> None:
        if isinstance(model, TransformersModel):  # it takes no adapters
            config = replace(options.config, lora_cache_gpu_memory_fraction=0.0)
            options = replace(options, config=config)
        super().__init__(options, model.decoder, longest_sequence(options.config, model.decoder), device)
        self._model = model

    def check_room(self) -> None:
        """Raise ConfigError if the weights together with the smallest KV cache do not fit into free memory."""
        config, model, device = self.config, self._model, self.device
        free_bytes = free_memory(device) // (1 if device.type == "cuda" else config.ranks_on_host)
        self.options.min_over_ranks(free_bytes)  # all ranks have looked before any of them takes memory
        if isinstance(model, TransformersModel):  # already loaded
            return
        num_bytes = _weight_bytes(config, model, self.part)
        are_mapped = config.weights == MMAP and runs_compiled(config, model, device, self.part.shard)
        if self.options.kept is not None:
            if not are_mapped:
                left_by_weights(num_bytes, free_bytes, device.type == "cuda", LESS_WEIGHTS)
            return
        dtype, quantization = computed_dtype(config, model), find_kv_quantization(config.kv_cache_dtype)
        size = block_bytes(self.held, config.tokens_per_block, dtype, quantization)
        of_states = total_state_bytes(config, self.held, dtype)
        on_gpu, longest = device.type == "cuda", self.max_sequence_length
        check_room(config, num_bytes, longest, size, free_bytes, on_gpu, are_mapped, of_states)
        if are_mapped and num_bytes > free_bytes:
            _log.warning(
                "%.2f GB of weights are mapped, but only %.2f GB of memory are free: parts of the weights are "
                "read from the file again in every iteration",
                num_bytes / 1e9,
                free_bytes / 1e9,
            )

    def load_weights(self) -> AnyDecoder:
        """Read the rank's weights into the decoder for this machine."""
        config, decoder, longest = self.config, self._model.decoder, self.max_sequence_length
        windows = layer_windows(
            decoder.sliding_windows,
            config.max_attention_window_size,
            config.sink_token_length,
            longest,
            decoder.attention_chunks,
        )
        num_bytes = partial(_weight_bytes, config, self._model, self.part)
        with allocating("the weights", num_bytes, self.device, LESS_WEIGHTS):
            return load_decoder(
                config, self._model, self.device, self.part, windows, longest, self.options.collectives
            )

    def load_head(self, decoder: AnyDecoder) -> MakeDraftHead | None:
        """Read the rank's part of the draft head; None without one, or before the last pipeline stage."""
        model = self._model
        if isinstance(model, TransformersModel) or isinstance(decoder, TransformersDecoder):
            return None
        if not (model.decoder.drafts and self.part.is_last_stage):
            return None
        return load_draft_head(self.config, model, decoder, self.device)

    def draft_costs(self) -> DraftCosts:
        """Return what the draft head's work costs, on every rank."""
        if isinstance(self._model, TransformersModel) or not self._model.decoder.drafts:
            return NO_COSTS
        num_bytes = _weight_bytes(self.config, self._model, Part.whole(self._model.decoder))
        return find_draft_costs(self._model, num_bytes, self.device)

    def reserve_adapters(self, decoder: AnyDecoder) -> int:
        """Allocate pages for LoRA adapters; return their number."""
        config, min_over_ranks = self.config, self.options.min_over_ranks
        if (kept := self.options.kept) is not None:
            num_pages = kept.num_adapter_pages
        else:
            num_pages = count_adapter_pages(config, self.held, decoder.dtype, self.device, min_over_ranks)
        # Compiled layers allocate memory when an adapter is loaded.
        if num_pages and isinstance(decoder, Decoder):
            page_rank = config.lora_cache_optimal_adapter_size
            num_bytes = num_pages * page_bytes(self.held, page_rank, decoder.dtype)
            with allocating("LoRA adapters", lambda: num_bytes, self.device, _LESS_ADAPTERS):
                decoder.reserve_adapters(num_pages, page_rank)
        return num_pages

    def allocate_cache(self, decoder: AnyDecoder, num_adapter_pages: int, capture: Capture | None) -> KvCache:
        """Allocate the KV cache in the free memory, except for the estimated memory of recordings; or return the
        one that was kept."""
        if self.options.kept is not None:
            return self.options.kept.cache
        config, held, dtype, device = self.config, self.held, decoder.dtype, self.device
        states = allocate_states(config, held, dtype, device)
        reserved = 0
        if capture is not None and isinstance(decoder, Decoder):
            kinds = RecordedKinds.of(
                decoder.takes_fixed_rows,
                config.max_num_sequences,
                config.max_num_tokens,
                bool(num_adapter_pages),
            )
            reserved = kinds.num_bytes
        mapped = decoder.num_mapped_bytes if isinstance(decoder, NativeDecoder) else 0
        num_blocks = count_blocks(
            config,
            held,
            self.max_sequence_length,
            dtype,
            device,
            reserved,
            self.options.min_over_ranks,
            mapped,
        )
        quantization, size = find_kv_quantization(config.kv_cache_dtype), config.tokens_per_block
        num_bytes = (num_blocks + 1) * block_bytes(held, size, dtype, quantization)
        with allocating("the KV cache", lambda: num_bytes, device, _LESS_CACHE):
            return KvCache(held, num_blocks, size, dtype, device, quantization, states)


def _stored_bytes(config: EngineConfig) -> int:
    """Return the size of the checkpoint's weights on disk in bytes; transformers takes about as much memory."""
    return sum(file.stat().st_size for file in Path(str(config.gpt_model_path)).glob("*.safetensors"))


def _weight_bytes(config: EngineConfig, model: ModelDescription | TransformersModel, part: Part) -> int:
    """Return the memory that a rank's weights take, in bytes."""
    if isinstance(model, TransformersModel):  # already loaded
        return 0
    return weight_bytes(config, model, find_device(config.device), part)
