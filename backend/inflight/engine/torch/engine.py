"""The torch engine: a Runner on torch, loaded from a checkpoint, with the Sampler where tokens are chosen.

Owns the weights, the KV cache and the slots; how tokens are chosen, `inflight.decoding` owns. One thread calls it,
the loop's. On a GPU `forward` waits for the device only where context outputs are wanted (or a top-p comes with a
top-k that keeps the whole vocabulary), generation batches are recorded once and replayed (`generation_graphs.py`),
and the next batch is forwarded while one is computed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.core.schedule.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.decoding import Decoding
from inflight.decoding.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from inflight.decoding.transfer import upload
from inflight.engine.context_outputs import ContextOutputs
from inflight.engine.engine import ModelEngine, Pending, Runner
from inflight.engine.memory import KvCacheDemand, free_memory, plan_kv_cache
from inflight.engine.packing import generation_rows, pack
from inflight.engine.slots import SlotTable
from inflight.engine.torch.collectives import ALONE, Collectives
from inflight.engine.torch.cuda import GraphCapture
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.generation_graphs import Capture, GenerationGraphs, graph_bytes
from inflight.engine.torch.kv_cache import KvCache, block_bytes
from inflight.engine.torch.load_decoder import load_decoder
from inflight.engine.torch.native.decoder import NativeDecoder
from inflight.engine.windows import layer_windows
from inflight.errors import ConfigError
from inflight.guided.grammars import Grammars
from inflight.models import DecoderConfig, read_model_description
from inflight.models.decoder_config import DynamicScaling
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping

_logger = logging.getLogger(__name__)
_ALONE = Mapping()

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
        capture: Records generation batches, if they are to be recorded; `decoder` is then all of a model and has
            fixed shapes.

    Attributes:
        decoder_config: What the checkpoint says of the model.
        dtype: Of weights, activations and KV cache: float32, bfloat16 or float16.
        kernels: What computes the layers: "native" or "torch".
        recorded_sizes: Of which numbers of rows generation batches are recorded; empty: none are.
    """

    def __init__(
        self,
        decoder: Decoder | NativeDecoder,
        cache: KvCache,
        limits: EngineLimits,
        max_num_tokens: int,
        mapping: Mapping = _ALONE,
        capture: Capture | None = None,
    ) -> None:
        max_blocks = -(-limits.max_sequence_length // limits.tokens_per_block)
        slots = SlotTable(
            limits.max_num_sequences, max_blocks, limits.tokens_per_block, cache.null_block, cache.device
        )
        super().__init__(limits, slots)
        self.decoder_config = decoder.config
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.kernels = "native" if isinstance(decoder, NativeDecoder) else "torch"
        self.decoder = decoder
        self.cache = cache
        self._max_num_tokens = max_num_tokens
        self._graphs = None
        if capture is not None and isinstance(decoder, Decoder):
            self._graphs = _record(decoder, slots, cache, capture)
        self.recorded_sizes = () if self._graphs is None else self._graphs.sizes
        self._is_last_stage = mapping.is_last_stage
        self.context_outputs = ContextOutputs(limits.vocab_size, is_kept=mapping.is_sampler)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, by the checkpoint."""
        return self.decoder_config.eos_token_ids

    def run(self, batch: ScheduledBatch, hidden: Tensor | None) -> tuple[Tensor, dict[int, ContextDetails]]:
        """As `Runner.run`."""
        fresh_blocks = self.slots.apply(batch)
        self.context_outputs.apply(batch)
        self._prepare_blocks(batch, fresh_blocks)
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"batch of {batch.num_tokens} tokens, max_num_tokens is {self._max_num_tokens}")
        computed = self._compute(batch, hidden)
        self.slots.advance(batch)
        return computed

    def close(self) -> None:
        """As `Runner.close`."""
        for name in ("decoder", "cache", "slots", "context_outputs", "_graphs"):
            vars(self).pop(name, None)

    def _compute(
        self, batch: ScheduledBatch, hidden: Tensor | None
    ) -> tuple[Tensor, dict[int, ContextDetails]]:
        if self._graphs is not None and batch.generation_slots and not batch.context:
            rows = generation_rows(batch, self.slots, self.cache.tokens_per_block)
            return self.decoder.logits(*self._graphs.forward(rows)), {}
        packed = pack(batch, self.slots, self.cache.tokens_per_block)
        arguments = (packed, self.slots.block_tables, self.cache, hidden)
        if not self._is_last_stage:
            return self.decoder.forward(*arguments), {}
        if not any(chunk.wants_context for chunk in batch.context):
            return self.decoder.forward_to_logits(*arguments), {}
        hidden = self.decoder.forward(*arguments)
        context = self.context_outputs.compute(batch, packed.chunks, hidden, self.decoder.logits)
        return self.decoder.logits(hidden, packed.sampled_rows), context

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        """Copy blocks, then clear new ones: a block that is copied may not be cleared or written before."""
        device = self.cache.device
        if batch.block_copies:
            self.cache.copy(*upload(np.array(batch.block_copies), device).unbind(1))
        if fresh_blocks and self.decoder.needs_cleared_blocks:
            self.cache.clear(upload(np.array(fresh_blocks), device))


class TorchEngine(ModelEngine):
    """A TorchRunner of a whole model, or of its last pipeline stage, and the Sampler. Made by `load`.

    Attributes:
        runner: The model.
        decoder_config: As the runner's, like those that follow.
        dtype: As the runner's.
        eos_token_ids: As the runner's.
        kernels: As the runner's.
        recorded_sizes: As the runner's.
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
        self.recorded_sizes = runner.recorded_sizes

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        processors: LogitsPostProcessors = NO_POST_PROCESSORS,
        make_grammars: MakeGrammars = no_grammars,
    ) -> TorchEngine:
        """Read a whole model and allocate its KV cache; requests may name `processors`.

        Args:
            config: What to load, and how.
            make_grammars: Called with the size of the vocabulary: makes what follows guides.

        Raises:
            ConfigError: A parameter or the checkpoint cannot be used, or there is too little memory.
        """
        runner = _load_runner(config, _ALONE, ALONE, int, processors.names)
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
) -> TorchRunner | TorchEngine:
    """Read one rank's part of a model and allocate its KV cache: with the Sampler at the rank that chooses tokens.

    Args:
        config: What to load, and how.
        mapping: Which rank this is of those that hold the model together.
        collectives: Connects the ranks of this one's pipeline stage.
        agree: Called once, with the number of KV blocks that this rank has room for; returns the least of all
            ranks'. With its ConfigError, this one's load fails too.
        processors: What requests may name; those of all ranks have the same names.
        make_grammars: As for `TorchEngine.load`; called at the rank that chooses tokens.

    Raises:
        ConfigError: As `TorchEngine.load`.
    """
    runner = _load_runner(config, mapping, collectives, agree, processors.names)
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
    device = _device(config.device)
    if config.engine_threads is not None:
        torch.set_num_threads(config.engine_threads)
    assert config.gpt_model_path is not None, "build names the demo model where nothing is given"
    model = read_model_description(config.gpt_model_path)
    max_sequence_length = _max_sequence_length(config, model.decoder)
    windows = layer_windows(
        model.decoder.sliding_windows,
        config.max_attention_window_size,
        config.sink_token_length,
        max_sequence_length,
    )
    part = Part.from_mapping(mapping, model.decoder)
    decoder = load_decoder(config, model, device, part, windows, max_sequence_length, collectives)
    held = part.held_config(model.decoder)
    capture = _find_capture(config, decoder, mapping, device)
    reserved = 0 if capture is None else graph_bytes(config.max_num_sequences)
    num_blocks = _num_blocks(config, held, max_sequence_length, decoder.dtype, device, reserved, agree)
    cache = KvCache(held, num_blocks, config.tokens_per_block, decoder.dtype, device)
    limits = EngineLimits(
        vocab_size=model.decoder.vocab_size,
        max_sequence_length=max_sequence_length,
        max_num_sequences=config.max_num_sequences,
        num_blocks=num_blocks,
        tokens_per_block=config.tokens_per_block,
        num_micro_batches=mapping.pp_size,
        overlaps_iterations=device.type == "cuda" and mapping.world_size == 1,
        takes_all_processors=device.type == "cpu" and torch.get_num_threads() >= len(os.sched_getaffinity(0)),
        logits_post_processors=post_processor_names,
    )
    return TorchRunner(decoder, cache, limits, config.max_num_tokens, mapping, capture)


def _device(name: str | None) -> torch.device:
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


def _find_capture(
    config: EngineConfig, decoder: Decoder | NativeDecoder, mapping: Mapping, device: torch.device
) -> Capture | None:
    """Records generation batches; None if they are not to be recorded, and the log says why."""
    if device.type != "cuda" or not decoder.has_fixed_shapes:  # it was said when the attention was chosen
        return None
    if config.cuda_graph_mode and mapping.world_size == 1:
        return GraphCapture(device)
    _logger.info(
        "generation runs without CUDA graphs: %s",
        "what several ranks tell each other is not recorded"
        if config.cuda_graph_mode
        else "they are turned off",
    )
    return None


def _record(decoder: Decoder, slots: SlotTable, cache: KvCache, capture: Capture) -> GenerationGraphs | None:
    started = time.monotonic()
    try:
        graphs = GenerationGraphs(decoder, slots, cache, capture)
    except RuntimeError as error:  # what a device raises
        _logger.warning("generation runs without CUDA graphs, because they cannot be recorded: %s", error)
        return None
    sizes = graphs.sizes
    took = time.monotonic() - started
    _logger.info(
        "generation of up to %d rows in %d CUDA graphs, recorded in %.1f s", sizes[-1], len(sizes), took
    )
    return graphs


def _max_sequence_length(config: EngineConfig, decoder: DecoderConfig) -> int:
    """What was asked for, or all that the positions reach. ConfigError for more than that."""
    wanted, longest = config.max_sequence_length, decoder.max_positions
    if wanted is None or wanted <= longest:
        return wanted or longest
    reason = ""
    if decoder.rope is not None and isinstance(decoder.rope.scaling, DynamicScaling):
        reason = (
            ": its rotary positions are of type dynamic, which change for all tokens of a sequence with every one "
            "beyond that, so that cached keys would be wrong; type yarn or linear in config.json reaches further"
        )
    raise ConfigError(
        f"max_sequence_length is {wanted}, expected at most {longest}, which is how far the positions of "
        f"{config.gpt_model_path} reach{reason}"
    )


def _num_blocks(
    config: EngineConfig,
    decoder: DecoderConfig,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    reserved: int,
    agree: Callable[[int], int],
) -> int:
    """How many blocks the cache gets; `reserved` bytes are left for what the device is asked for after it."""
    on_gpu = device.type == "cuda"
    name = "kv_cache_free_gpu_mem_fraction" if on_gpu else "kv_cache_free_cpu_mem_fraction"
    size = block_bytes(decoder, config.tokens_per_block, dtype)
    plan = plan_kv_cache(
        KvCacheDemand(
            block_bytes=size,
            tokens_per_block=config.tokens_per_block,
            max_num_sequences=config.max_num_sequences,
            max_sequence_length=max_sequence_length,
            free_bytes=max(0, free_memory(device) - reserved) // (1 if on_gpu else config.ranks_on_host),
            fraction=getattr(config, name),
            fraction_name=name,
            max_tokens=config.max_tokens_in_paged_kv_cache,
            bounded_by_use=not on_gpu,
        )
    )
    num_blocks = agree(plan.num_blocks)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB; %s decides",
        num_blocks,
        config.tokens_per_block,
        num_blocks * size / 2**20,
        plan.decided_by if num_blocks == plan.num_blocks else "another rank",
    )
    return num_blocks
