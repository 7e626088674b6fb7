"""The torch engine: a Runner on torch, loaded from a checkpoint, with the Sampler where tokens are chosen.

Owns the weights, the KV cache and the slots; how tokens are chosen, `inflight.sampling` owns. One thread calls it,
the loop's. On a GPU `forward` waits for the device only where context outputs are wanted (or a top-p comes with a
top-k that keeps the whole vocabulary), iterations are recorded once and replayed (`iteration_graphs.py`), and the
next batch is forwarded while one is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inflight.config import QUANTIZED, EngineConfig
from inflight.core.schedule.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.engine.adapter_pool import page_bytes
from inflight.engine.additional_outputs import (
    AdditionalOutputs,
    HiddenStates,
    LayerOutputs,
)
from inflight.engine.collectives import ALONE, Collectives
from inflight.engine.context_outputs import ContextOutputs
from inflight.engine.cuda.graph_capture import GraphCapture
from inflight.engine.cuda.iteration_graphs import Capture, IterationGraphs, RecordedKinds
from inflight.engine.debug_tensors import DebugTensors
from inflight.engine.engine import ModelEngine, Pending, RowOutputs, Runner
from inflight.engine.interfaces import BlockCache, RecordedDecoder, RunnerDecoder
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.engine.kv_rounding import find_rounding
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.transformers_decoder import TransformersModel
from inflight.engine.load_decoder import computed_dtype, find_model, kept_kinds, load_decoder
from inflight.engine.memory import (
    allocating,
)
from inflight.engine.packing import PackedBatch, pack
from inflight.engine.prompt_tables import PromptTables
from inflight.engine.room import (
    count_adapter_pages,
    count_blocks,
    find_device,
    longest_sequence,
    make_limits,
    offer_outputs,
)
from inflight.engine.slots import SlotTable
from inflight.engine.windows import layer_windows
from inflight.guided.grammars import Grammars
from inflight.models.loader import check_weights, num_weight_bytes
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping
from inflight.sampling import Decoding
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from inflight.sampling.transfer import upload

_logger = logging.getLogger(__name__)
_ALONE = Mapping()

_LESS_WEIGHTS = (
    "take a smaller dtype (bfloat16, int8, fp8), several ranks (--tp, --pp), or end what else uses memory"
)
_LESS_CACHE = "lower kv_cache_free_gpu_mem_fraction or max_tokens_in_paged_kv_cache"

MakeGrammars = Callable[[int], Grammars | None]


def no_grammars(vocab_size: int) -> None:
    """For an engine that follows no guides."""


class TorchRunner(Runner):
    """A model or a part of one, loaded, and everything that it remembers between iterations.

    Args:
        decoder: Computes the layers.
        cache: Their KV cache.
        limits: What requests and batches may ask for.
        max_num_tokens: Most rows of a forward pass.
        mapping: Which rank's part this is.
        capture: Records iterations, if they are to be recorded; `decoder` is then all of a model and has fixed
            shapes.
        debug_tensors: Writes iterations down, none of which is replayed then.

    Attributes:
        decoder_config: What the checkpoint says of the model.
        dtype: Of weights, activations and KV cache: float32, bfloat16 or float16.
        kernels: What computes the layers: "native", "torch", "transformers" or "tensorrt".
        recorded: Of which iterations there are recordings.
    """

    def __init__(
        self,
        decoder: RunnerDecoder,
        cache: BlockCache,
        limits: EngineLimits,
        max_num_tokens: int,
        mapping: Mapping = _ALONE,
        capture: Capture | None = None,
        debug_tensors: DebugTensors | None = None,
    ) -> None:
        slots = SlotTable(limits, cache.null_block, cache.device)
        super().__init__(limits, slots)
        self.decoder_config = decoder.config
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.kernels = decoder.kernels
        self.decoder = decoder
        self.cache = cache
        self._max_num_tokens = max_num_tokens
        self._graphs = None
        if capture is not None and debug_tensors is None:
            self._graphs = _record(cast(RecordedDecoder, decoder), slots, cache, capture, max_num_tokens)
        self.recorded = RecordedKinds(()) if self._graphs is None else self._graphs.kinds
        self._is_last_stage, self._is_sampler = mapping.is_last_stage, mapping.is_sampler
        self.additional_outputs = AdditionalOutputs(decoder.config.num_layers)
        self.context_outputs = ContextOutputs(limits.vocab_size, mapping.is_sampler, self.additional_outputs)
        self.debug_tensors = debug_tensors
        self.prompt_tables = PromptTables(
            limits.vocab_size, decoder.dtype, cache.device, mapping.is_first_stage
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, by the checkpoint."""
        return self.decoder_config.eos_token_ids

    def run(self, batch: ScheduledBatch, hidden: Tensor | None) -> RowOutputs:
        """As `Runner.run`."""
        for load in batch.adapter_loads:
            self.decoder.load_adapter(load)
        fresh_blocks = self.slots.apply(batch)
        self.prompt_tables.apply(batch)
        self.context_outputs.apply(batch)
        self.additional_outputs.apply(batch)
        self._prepare_blocks(batch, fresh_blocks)
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"batch of {batch.num_tokens} tokens, max_num_tokens is {self._max_num_tokens}")
        computed = self._compute(batch, hidden)
        self.slots.advance(batch)
        return computed

    def agree_on_recordings(self, agree: Callable[[int], int]) -> None:
        """Launch one by one what some rank has no recording of: the ranks of a stage add up theirs row by row.

        A replayed batch has rows that fill it up, and generation rows in an order of its own. `agree` returns the
        least of all ranks' numbers.
        """
        lacking = ""
        if not agree(len(self.recorded.generation_sizes)):
            lacking = "iterations run" if self._graphs is not None else ""
            self._graphs, self.recorded = None, RecordedKinds(())
        elif not agree(len(self.recorded.mixed_sizes)) and self._graphs is not None:
            lacking = "iterations with chunks run" if self.recorded.mixed_sizes else ""
            self._graphs.drop_mixed()
            self.recorded = self._graphs.kinds
        if lacking:
            _logger.warning("%s without CUDA graphs, because another rank cannot record them", lacking)

    def close(self) -> None:
        """As `Runner.close`."""
        for name in (
            "decoder", "cache", "slots", "context_outputs", "additional_outputs", "prompt_tables", "_graphs",
        ):  # fmt: skip
            vars(self).pop(name, None)

    def _compute(self, batch: ScheduledBatch, hidden: Tensor | None) -> RowOutputs:
        between = HiddenStates()
        if are_wanted := self.additional_outputs.are_wanted(batch):
            between = self.additional_outputs.between_layers(batch)
        virtual = self.prompt_tables.virtual_rows(batch)
        if self._graphs is not None and batch.num_tokens and virtual is None and not between.wanted:
            replayed = self._graphs.forward(batch)
            if replayed is not None:
                return self._outputs(batch, *replayed, between, are_wanted)
        packed = pack(batch, self.slots, virtual)
        outputs = self._compute_packed(batch, packed, hidden, between, are_wanted)
        if self.debug_tensors is not None:
            logits = outputs.rows if self._is_last_stage else None
            self.debug_tensors.write(batch.iteration, packed, logits)
        return outputs

    def _compute_packed(
        self,
        batch: ScheduledBatch,
        packed: PackedBatch,
        hidden: Tensor | None,
        between: HiddenStates,
        are_wanted: bool,
    ) -> RowOutputs:
        arguments = (packed, self.cache, hidden)
        if not self._is_last_stage:
            return RowOutputs(self.decoder.forward(*arguments))
        if not (are_wanted or any(chunk.wants_context for chunk in batch.context)):
            return RowOutputs(self.decoder.forward_to_logits(*arguments))
        hidden = self.decoder.forward(*arguments, between)
        return self._outputs(batch, hidden, packed.sampled_rows, between, are_wanted)

    def _outputs(
        self,
        batch: ScheduledBatch,
        hidden: Tensor,
        sampled_rows: Tensor,
        between: HiddenStates,
        are_wanted: bool,
    ) -> RowOutputs:
        """The logits of rows that choose tokens, and what is wanted beside, of what the last layer returned."""
        layers = LayerOutputs(hidden, self.decoder.normalize, between.found)
        context: dict[int, ContextDetails] = {}
        if any(chunk.wants_context for chunk in batch.context):
            context = self.context_outputs.compute(batch, layers, self.decoder.logits)
        logits = self.decoder.logits(hidden, sampled_rows)
        if not (are_wanted and self._is_sampler):
            return RowOutputs(logits, context)
        additional = self.additional_outputs.of_tokens(batch, layers, sampled_rows, logits)
        return RowOutputs(logits, context, additional)

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        """Copy blocks, then clear new ones: a block that is copied may not be cleared or written before."""
        device = self.cache.device
        if batch.block_copies:
            self.cache.copy(*upload(np.array(batch.block_copies), device).unbind(1))
        if fresh_blocks and self.decoder.needs_cleared_blocks:
            self.cache.clear(upload(np.array(fresh_blocks), device))


LoadRunner = Callable[
    [EngineConfig, Mapping, Collectives, Callable[[int], int], tuple[str, ...]], TorchRunner
]
"""Loads a rank's part of a model: takes what to load, which rank this is, the ranks of its stage, what agrees on a
number as `load_stage` has it, and the names of logits post-processors."""


class TorchEngine(ModelEngine):
    """A TorchRunner of a whole model, or of its last pipeline stage, and the Sampler. Made by `load`.

    Attributes:
        runner: The model.
        decoder_config: As the runner's, like those that follow.
        dtype: As the runner's.
        eos_token_ids: As the runner's.
        kernels: As the runner's.
        recorded: As the runner's.
    """

    runner: TorchRunner

    @torch.inference_mode()
    def __init__(
        self,
        runner: TorchRunner,
        normalize_log_probs: bool = False,
        processors: LogitsPostProcessors = NO_POST_PROCESSORS,
        grammars: Grammars | None = None,
    ) -> None:
        sampler = Decoding(
            runner.limits.max_num_sequences,
            runner.limits.max_sequence_length,
            runner.limits.vocab_size,
            runner.cache.device,
            runner.decoder.row_kernels,
            normalize_log_probs,
            processors,
            grammars,
        )
        super().__init__(runner, sampler)
        self.decoder_config = runner.decoder_config
        self.dtype = runner.dtype
        self.eos_token_ids = runner.eos_token_ids
        self.kernels = runner.kernels
        self.recorded = runner.recorded

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        processors: LogitsPostProcessors = NO_POST_PROCESSORS,
        make_grammars: MakeGrammars = no_grammars,
        load_runner: LoadRunner | None = None,
    ) -> TorchEngine:
        """Read a whole model and allocate its KV cache; requests may name `processors`.

        Args:
            config: What to load, and how.
            make_grammars: Called with the size of the vocabulary: makes what follows guides.
            load_runner: Loads the runner; None: one that computes with torch.

        Raises:
            ConfigError: A parameter or the checkpoint cannot be used, or there is too little memory.
        """
        runner = (load_runner or _load_runner)(config, _ALONE, ALONE, int, processors.names)
        grammars = make_grammars(runner.limits.vocab_size)
        return cls(runner, config.normalize_log_probs, processors, grammars)


class TorchReplica(TorchEngine):
    """A TorchEngine at a rank whose tokens another chooses, from the same logits.

    It calls the logits post-processors too, so that what they keep is the same at all ranks with these logits.
    """

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Pending:
        """As `TorchEngine.forward`."""
        pending = super().forward(batch, hidden)
        assert isinstance(pending.result, Tensor), "several ranks sample after the forward pass"
        self.sampler.post_process(batch, pending.result, pending.positions)
        return pending

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """As `Runner.remember`."""
        super().remember(batch, output)
        self.sampler.remember(batch, output)


def load_stage(
    config: EngineConfig,
    mapping: Mapping,
    collectives: Collectives = ALONE,
    agree: Callable[[int], int] = int,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    make_grammars: MakeGrammars = no_grammars,
    load_runner: LoadRunner | None = None,
) -> TorchRunner | TorchEngine:
    """Read one rank's part of a model and allocate its KV cache: with the Sampler at the rank that chooses tokens.

    Args:
        config: What to load, and how.
        mapping: Which rank this is of those that hold the model together.
        collectives: Connects the ranks of this one's pipeline stage.
        agree: Called with the number of pages for adapters that this rank has room for, then with its number of
            KV blocks, on a GPU also with whether it is to record iterations, and how many kinds it has; returns
            the least of all ranks'. With its ConfigError, this one's load fails too.
        processors: What requests may name; those of all ranks have the same names.
        make_grammars: As for `TorchEngine.load`; called at the rank that chooses tokens.
        load_runner: As for `TorchEngine.load`.

    Raises:
        ConfigError: As `TorchEngine.load`.
    """
    runner = (load_runner or _load_runner)(config, mapping, collectives, agree, processors.names)
    if mapping.is_sampler:
        grammars = make_grammars(runner.limits.vocab_size)
        return TorchEngine(runner, config.normalize_log_probs, processors, grammars)
    if mapping.is_last_stage and processors.names and processors.replicate:
        return TorchReplica(runner, processors=processors)
    return runner


@torch.inference_mode()
def _load_runner(
    config: EngineConfig,
    mapping: Mapping,
    collectives: Collectives,
    agree: Callable[[int], int],
    post_processor_names: tuple[str, ...],
) -> TorchRunner:
    config.validate()
    device = find_device(config.device)
    if config.engine_threads is not None:
        torch.set_num_threads(config.engine_threads)
    assert config.gpt_model_path is not None, "build names the demo model where nothing is given"
    with allocating("the weights", partial(_stored_bytes, config), device, _LESS_WEIGHTS):
        model = find_model(config, device, mapping.world_size)
    if isinstance(model, TransformersModel):  # which takes no adapters
        config = replace(config, lora_cache_gpu_memory_fraction=0.0)
    else:
        check_weights(model)  # before anything that takes time
    offered = offer_outputs(config, model.decoder, mapping)
    debug_tensors = DebugTensors.from_config(config, mapping.pp_rank, mapping.tp_rank)
    max_sequence_length = longest_sequence(config, model.decoder)
    windows = layer_windows(
        model.decoder.sliding_windows,
        config.max_attention_window_size,
        config.sink_token_length,
        max_sequence_length,
    )
    part = Part.from_mapping(mapping, model.decoder)
    weight_bytes = partial(_weight_bytes, config, model, mapping)
    with allocating("the weights", weight_bytes, device, _LESS_WEIGHTS):
        decoder = load_decoder(config, model, device, part, windows, max_sequence_length, collectives)
    held = part.held_config(model.decoder)
    num_adapter_pages = count_adapter_pages(config, held, decoder.dtype, device, agree)
    if num_adapter_pages and isinstance(decoder, Decoder):  # compiled layers take memory as adapters come
        page_rank = config.lora_cache_optimal_adapter_size
        adapter_bytes = num_adapter_pages * page_bytes(held, page_rank, decoder.dtype)
        with allocating(
            "LoRA adapters", lambda: adapter_bytes, device, "lower lora_cache_gpu_memory_fraction"
        ):
            decoder.reserve_adapters(num_adapter_pages, page_rank)
    capture = find_capture(config, decoder.has_fixed_shapes, mapping, device, debug_tensors is not None)
    if device.type == "cuda" and not agree(int(capture is not None)):
        capture = None
    reserved = 0
    if capture is not None and isinstance(decoder, Decoder):
        kinds = RecordedKinds.of(
            decoder.takes_fixed_rows, config.max_num_sequences, config.max_num_tokens, bool(num_adapter_pages)
        )
        reserved = kinds.num_bytes
    num_blocks = count_blocks(config, held, max_sequence_length, decoder.dtype, device, reserved, agree)
    rounding, size = find_rounding(config.kv_cache_dtype), config.tokens_per_block
    cache_bytes = (num_blocks + 1) * block_bytes(held, size, decoder.dtype, rounding)
    with allocating("the KV cache", lambda: cache_bytes, device, _LESS_CACHE):
        cache = KvCache(held, num_blocks, size, decoder.dtype, device, rounding)
    limits = make_limits(
        config, model.decoder, max_sequence_length, num_blocks, num_adapter_pages, device, mapping
    )
    limits = replace(limits, logits_post_processors=post_processor_names, additional_outputs=offered)
    runner = TorchRunner(decoder, cache, limits, config.max_num_tokens, mapping, capture, debug_tensors)
    if device.type == "cuda":
        runner.agree_on_recordings(agree)
    return runner


def _stored_bytes(config: EngineConfig) -> int:
    """What the checkpoint's weights take on disk, and about that in memory if transformers reads them."""
    return sum(file.stat().st_size for file in Path(str(config.gpt_model_path)).glob("*.safetensors"))


def _weight_bytes(config: EngineConfig, model: ModelDescription | TransformersModel, mapping: Mapping) -> int:
    """About what a rank's weights take."""
    if isinstance(model, TransformersModel):  # it has them already
        return 0
    dtype = computed_dtype(config, model)
    of_linear = torch.int8 if config.dtype in QUANTIZED else dtype
    kept = kept_kinds(config, model, find_device(config.device))
    return num_weight_bytes(model, dtype, of_linear, kept) // mapping.world_size


def find_capture(
    config: EngineConfig,
    has_fixed_shapes: bool,
    mapping: Mapping,
    device: torch.device,
    has_debug_tensors: bool,
) -> Capture | None:
    """Records iterations; None if they are not to be recorded, and the log says why."""
    if device.type != "cuda" or not has_fixed_shapes:  # it was said when the attention was chosen
        return None
    if config.cuda_graph_mode and mapping.pp_size == 1 and not has_debug_tensors:
        if any(output.name.startswith("hidden_states_") for output in config.additional_model_outputs):
            _logger.info("iterations with a request that wants hidden_states_<i> run without CUDA graphs")
        return GraphCapture(device)
    _logger.info(
        "iterations run without CUDA graphs: %s",
        "they are turned off"
        if not config.cuda_graph_mode
        else "debug tensors are written down"
        if has_debug_tensors
        else "what pipeline stages hand on is not recorded",
    )
    return None


def _record(
    decoder: RecordedDecoder, slots: SlotTable, cache: BlockCache, capture: Capture, max_num_tokens: int
) -> IterationGraphs | None:
    started = time.monotonic()
    try:
        graphs = IterationGraphs(decoder, slots, cache, capture, max_num_tokens)
    except RuntimeError as error:  # what a device raises
        _logger.warning("iterations run without CUDA graphs, because they cannot be recorded: %s", error)
        return None
    kinds, took = graphs.kinds, time.monotonic() - started
    _logger.info(
        "generation of up to %d rows, and iterations with chunks %s, in %d CUDA graphs, recorded in %.1f s",
        kinds.generation_sizes[-1],
        f"of up to {kinds.mixed_sizes[-1]}" if kinds.mixed_sizes else "not",
        graphs.count,
        took,
    )
    if graphs.adapter_ranks:
        _logger.info(
            "iterations whose LoRA adapters have more than %d ranks together, or magnitudes (DoRA), run without "
            "CUDA graphs",
            graphs.adapter_ranks,
        )
    return graphs
