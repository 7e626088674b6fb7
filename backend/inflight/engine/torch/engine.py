"""TorchEngine: `inflight.core.ports.Engine` on torch.

Owns the weights, the KV cache and the slots; how tokens are chosen, `inflight.decoding` owns. One thread calls
it, the loop's. On a GPU `forward` waits for the device only where context outputs are wanted (or a top-p comes
with a top-k that keeps the whole vocabulary), generation batches are recorded once and replayed
(`generation_graphs.py`), and the next batch is forwarded while one is computed.

It may be one rank's part of a model. Then `inflight.ranks.rank_engine` takes its place before the loop, and
what becomes of a batch comes back from the one rank that chooses tokens, when others have begun already.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.decoding import Choice, Decoding
from inflight.decoding.transfer import upload
from inflight.engine.torch.collectives import ALONE, Collectives
from inflight.engine.torch.config import TorchEngineConfig
from inflight.engine.torch.context_outputs import ContextOutputs
from inflight.engine.torch.cuda import GraphCapture
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.generation_graphs import Capture, GenerationGraphs, graph_bytes
from inflight.engine.torch.kv_cache import KvCache, block_bytes
from inflight.engine.torch.load_decoder import load_decoder
from inflight.engine.torch.memory import KvCacheDemand, plan_kv_cache
from inflight.engine.torch.memory_probe import free_memory
from inflight.engine.torch.native.decoder import NativeDecoder
from inflight.engine.torch.packing import generation_rows, pack
from inflight.engine.torch.slot_table import SlotTable
from inflight.engine.torch.void_slots import VoidSlots
from inflight.engine.torch.windows import layer_windows
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, read_model_description
from inflight.models.decoder_config import DynamicScaling
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping

_logger = logging.getLogger(__name__)
_ALONE = Mapping()


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch between `forward` and `decode`, which may come after the next `forward`.

    Attributes:
        result: If the batch feeds itself, what the device chose. Else logits to choose from, [rows, vocab_size]
            float32, in the order of `ScheduledBatch.sampled_slots`, 1 + num_draft_tokens rows for a chunk and one
            for a generation slot.
        positions: [rows] on the host: where in its sequence the token belongs that each row chooses.
        context: By slot, of chunks that want context outputs.
    """

    result: Choice | Tensor
    positions: NDArray[np.int64]
    context: dict[int, ContextDetails]


class TorchEngine:
    """A loaded model, or a part of one, and everything it remembers between iterations. Made by `load`.

    Attributes:
        limits: What requests and batches may ask for.
        decoder_config: What the checkpoint says of the model.
        dtype: Of weights, activations and KV cache: float32, bfloat16 or float16.
        eos_token_ids: Ids that end a sequence, by the checkpoint.
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
        normalize_log_probs: bool = False,
    ) -> None:
        """With `capture`, generation batches are recorded; `decoder` is all of a model and has fixed shapes."""
        self.limits = limits
        self.decoder_config = decoder.config
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.eos_token_ids = decoder.config.eos_token_ids
        self.kernels = "native" if isinstance(decoder, NativeDecoder) else "torch"
        self._decoder = decoder
        self._cache = cache
        self._max_num_tokens = max_num_tokens
        self._slots = SlotTable(
            limits.max_num_sequences,
            -(-limits.max_sequence_length // limits.tokens_per_block),
            limits.tokens_per_block,
            cache.null_block,
            cache.device,
        )
        self._graphs = None
        if capture is not None and isinstance(decoder, Decoder):
            self._graphs = _record(decoder, self._slots, cache, capture)
        self.recorded_sizes = () if self._graphs is None else self._graphs.sizes
        self._void_slots = VoidSlots()
        self._decoding, self._context_outputs = None, None
        if mapping.is_last_stage:
            self._context_outputs = ContextOutputs(limits.vocab_size, is_kept=mapping.is_sampler)
        if mapping.is_sampler:
            self._decoding = Decoding(
                limits.max_num_sequences,
                limits.max_sequence_length,
                limits.vocab_size,
                cache.device,
                decoder.row_kernels,
                normalize_log_probs,
            )

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        config: TorchEngineConfig,
        mapping: Mapping = _ALONE,
        collectives: Collectives = ALONE,
        agree: Callable[[int], int] = int,
    ) -> TorchEngine:
        """Read a checkpoint and allocate the KV cache.

        Args:
            config: What to load, and how.
            mapping: Which rank this is of those that hold the model together.
            collectives: Connects the ranks of this one's pipeline stage.
            agree: Called once, with the number of KV blocks that this rank has room for; returns the least of all
                ranks'. With its ConfigError, this one's load fails too.

        Raises:
            ConfigError: A parameter or the checkpoint cannot be used, or there is too little memory.
        """
        config.validate()
        device = _device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model = read_model_description(config.model_path)
        max_sequence_length = _max_sequence_length(config, model.decoder)
        windows = layer_windows(
            model.decoder.sliding_windows,
            config.attention_windows,
            config.sink_token_length,
            max_sequence_length,
        )
        part = Part.of(mapping, model.decoder)
        decoder = load_decoder(config, model, device, part, windows, max_sequence_length, collectives)
        held = part.of_model(model.decoder)
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
            takes_all_processors=device.type == "cpu"
            and torch.get_num_threads() >= len(os.sched_getaffinity(0)),
        )
        return cls(
            decoder, cache, limits, config.max_num_tokens, mapping, capture, config.normalize_log_probs
        )

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Tensor | Pending:
        """Take over the batch's slots and blocks, then run the packed forward pass.

        On a GPU, run means queue. Of a batch that feeds itself the tokens are chosen too.

        If this or `decode` raises, whatever for, the sequences of the batch have to start again; nothing else is
        affected.

        Args:
            batch: What to run.
            hidden: Behind the first pipeline stage, what the stage before returned.

        Returns:
            At the last stage what `decode` takes. Before, what the next stage takes: [batch.num_tokens,
            hidden_size] in the engine's dtype.

        Raises:
            ValueError: The batch breaks the contract: more than max_num_tokens rows, a row without a block, or one
                of a sequence whose last batch failed.
        """
        with self._void_slots.watch(batch):
            self._void_slots.refuse(batch)
            result, context = self._forward(batch, hidden)
            return result if self._context_outputs is None else self._pend(batch, result, context)

    def _forward(
        self, batch: ScheduledBatch, hidden: Tensor | None
    ) -> tuple[Tensor, dict[int, ContextDetails]]:
        """Logits, or hidden states for the next stage; and context outputs."""
        fresh_blocks = self._slots.apply(batch)
        if self._decoding is not None:
            self._decoding.apply(batch)
        if self._context_outputs is not None:
            self._context_outputs.apply(batch)
        self._prepare_blocks(batch, fresh_blocks)
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"batch of {batch.num_tokens} tokens, max_num_tokens is {self._max_num_tokens}")
        computed = self._compute(batch, hidden)
        self._slots.advance(batch)
        return computed

    def _pend(self, batch: ScheduledBatch, logits: Tensor, context: dict[int, ContextDetails]) -> Pending:
        positions = self._slots.positions(batch)
        if not (batch.samples_on_device and len(positions)):
            return Pending(logits, positions, context)
        choice = self._decoding.begin(batch, logits, positions)
        self._slots.feed(batch, choice.tokens)
        return Pending(choice, positions, context)

    def _compute(
        self, batch: ScheduledBatch, hidden: Tensor | None
    ) -> tuple[Tensor, dict[int, ContextDetails]]:
        if self._graphs is not None and batch.generation_slots and not batch.context:
            rows = generation_rows(batch, self._slots, self._cache.tokens_per_block)
            return self._decoder.logits(*self._graphs.forward(rows)), {}
        packed = pack(batch, self._slots, self._cache.tokens_per_block)
        arguments = (packed, self._slots.block_tables, self._cache, hidden)
        if self._context_outputs is None:
            return self._decoder.forward(*arguments), {}
        if not any(chunk.wants_context for chunk in batch.context):
            return self._decoder.forward_to_logits(*arguments), {}
        hidden = self._decoder.forward(*arguments)
        context = self._context_outputs.compute(batch, packed.chunks, hidden, self._decoder)
        return self._decoder.logits(hidden, packed.sampled_rows), context

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        """Copies first: nothing that is copied may be cleared or written before."""
        device = self._cache.device
        if batch.block_copies:
            self._cache.copy(*upload(np.array(batch.block_copies), device).unbind(1))
        if fresh_blocks and self._decoder.needs_cleared_blocks:
            self._cache.clear(upload(np.array(fresh_blocks), device))

    @torch.inference_mode()
    def decode(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        """`choose` and `remember`: for an engine that is all of a model.

        Called before the next `forward`, but for a batch that feeds itself: before the one after that.

        Raises:
            FloatingPointError: As `choose`.
        """
        with self._void_slots.watch(batch):
            output = self._choose(batch, pending)
            if not isinstance(pending.result, Choice):
                self._slots.remember(batch, output)
        return output

    @torch.inference_mode()
    def choose(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        """What follows every sampled row, at the rank that chooses, before its next `forward`; beams only rank.

        Raises:
            FloatingPointError: The model's logits are no numbers; names the slots.
        """
        return self._choose(batch, pending)

    def _choose(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        if isinstance(pending.result, Choice):
            output = self._decoding.finish(batch, pending.result, pending.positions)
        else:
            output = self._decoding.decode(batch, pending.result, pending.positions)
        return replace(output, context=pending.context) if pending.context else output

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """What was chosen is what the slots are fed next; batches without rows of theirs may have begun since."""
        self._slots.remember(batch, output)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """The batch failed on some rank: its slots are void, as if it had here.

        Batches that have begun `since` may have started some of those slots anew.
        """
        self._void_slots.add(batch, since)

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
        self._graphs = None
        self._decoder = self._cache = self._slots = self._decoding = None  # type: ignore[assignment]


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
    config: TorchEngineConfig, decoder: Decoder | NativeDecoder, mapping: Mapping, device: torch.device
) -> Capture | None:
    """Who records generation batches; None: nobody, and the log says why."""
    if device.type != "cuda" or not decoder.has_fixed_shapes:  # it was said when the attention was chosen
        return None
    if config.cuda_graphs and mapping.world_size == 1:
        return GraphCapture(device)
    _logger.info(
        "generation runs without CUDA graphs: %s",
        "what several ranks tell each other is not recorded" if config.cuda_graphs else "they are turned off",
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


def _max_sequence_length(config: TorchEngineConfig, decoder: DecoderConfig) -> int:
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
        f"{config.model_path} reach{reason}"
    )


def _num_blocks(
    config: TorchEngineConfig,
    decoder: DecoderConfig,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    reserved: int,
    agree: Callable[[int], int],
) -> int:
    """What the cache may have, besides `reserved` bytes that the device will be asked for after it."""
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
