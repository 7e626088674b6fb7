"""TorchEngine: `inflight.core.ports.Engine` on torch.

Owns the weights, the KV cache and the slots; how tokens are chosen, `inflight.decoding` owns. One thread calls
it, the loop's, and `decode` of a batch before `forward` of the next. On a GPU `forward` waits for the device only
where context outputs are wanted.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from inflight.core.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.decoding import Decoding
from inflight.engine.torch.attention_plan import plan_attention
from inflight.engine.torch.collectives import ALONE, Collectives
from inflight.engine.torch.config import TorchEngineConfig
from inflight.engine.torch.context_outputs import ContextOutputs
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.kv_cache import KvCache, block_bytes
from inflight.engine.torch.memory import KvCacheDemand, plan_kv_cache
from inflight.engine.torch.memory_probe import free_memory
from inflight.engine.torch.packing import pack
from inflight.engine.torch.slot_table import SlotTable
from inflight.engine.torch.void_slots import VoidSlots
from inflight.engine.torch.windows import layer_windows
from inflight.errors import ConfigError
from inflight.models import DecoderConfig, load_weights, read_model_description
from inflight.models.sharding import WHOLE, Shard

_logger = logging.getLogger(__name__)


class TorchEngine:
    """A loaded model and everything it remembers between iterations. Made by `load`.

    Attributes:
        limits: What requests and batches may ask for.
        decoder_config: What the checkpoint says of the model.
        dtype: Of weights, activations and KV cache: float32, bfloat16 or float16.
        eos_token_ids: Ids that end a sequence, by the checkpoint.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, limits: EngineLimits, max_num_tokens: int) -> None:
        self.limits = limits
        self.decoder_config = decoder.config
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.eos_token_ids = decoder.config.eos_token_ids
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
        self._decoding = Decoding(
            limits.max_num_sequences, limits.max_sequence_length, limits.vocab_size, cache.device
        )
        self._void_slots = VoidSlots()
        self._context_outputs = ContextOutputs(limits.vocab_size)
        self._context: dict[int, ContextDetails] = {}  # of the batch between forward and decode

    @classmethod
    @torch.inference_mode()
    def load(
        cls, config: TorchEngineConfig, shard: Shard = WHOLE, collectives: Collectives = ALONE
    ) -> TorchEngine:
        """Read a checkpoint and allocate the KV cache.

        With a shard, of a model that several ranks hold together: all of them run the same batches, `collectives`
        connects them, and each gets the whole logits.

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
        dtype = getattr(torch, config.dtype) if config.dtype else None
        weights = load_weights(model, dtype, device, shard)
        decoder = Decoder(model.decoder, weights, windows, max_sequence_length, shard, collectives)
        part = shard.part_of(model.decoder)
        num_blocks = _num_blocks(config, part, max_sequence_length, decoder.dtype, device)
        cache = KvCache(part, num_blocks, config.tokens_per_block, decoder.dtype, device)
        limits = EngineLimits(
            vocab_size=model.decoder.vocab_size,
            max_sequence_length=max_sequence_length,
            max_num_sequences=config.max_num_sequences,
            num_blocks=num_blocks,
            tokens_per_block=config.tokens_per_block,
        )
        return cls(decoder, cache, limits, config.max_num_tokens)

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Take over the batch's slots and blocks, then run the packed forward pass.

        If this or `decode` raises, whatever for, the sequences of the batch have to start again; nothing else is
        affected.

        Returns:
            Logits [rows, vocab_size] float32, in the order of `ScheduledBatch.sampled_slots`, 1 + num_draft_tokens
            rows for a chunk and one for a generation slot.

        Raises:
            ValueError: The batch breaks the contract: more than max_num_tokens rows, a row without a block, or one
                of a sequence whose last batch failed.
        """
        with self._void_slots.watch(batch):
            self._void_slots.refuse(batch)
            return self._forward(batch)

    def _forward(self, batch: ScheduledBatch) -> Tensor:
        fresh_blocks = self._slots.apply(batch)
        self._decoding.apply(batch)
        self._context_outputs.apply(batch)
        self._prepare_blocks(batch, fresh_blocks)
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"batch of {batch.num_tokens} tokens, max_num_tokens is {self._max_num_tokens}")
        tokens_per_block = self._cache.tokens_per_block
        packed = pack(batch, self._slots, tokens_per_block)
        plans = {
            window: plan_attention(
                packed, self._slots.block_tables, tokens_per_block, window, self._decoder.dtype
            )
            for window in self._decoder.windows
        }
        hidden = self._decoder.forward(packed, plans, self._cache)
        self._context = self._context_outputs.compute(batch, packed.chunks, hidden, self._decoder)
        logits = self._decoder.logits(hidden[packed.sampled_rows])
        self._slots.advance(batch)
        return logits

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        """Copies first: nothing that is copied may be cleared or written before."""
        device = self._cache.device
        if batch.block_copies:
            self._cache.copy(*torch.tensor(batch.block_copies, device=device).unbind(1))
        if fresh_blocks:
            self._cache.clear(torch.tensor(fresh_blocks, device=device))

    @torch.inference_mode()
    def decode(self, batch: ScheduledBatch, logits: Tensor) -> ModelOutput:
        """Choose what follows every sampled row and remember it as the slot's last token; beams only rank.

        Raises:
            FloatingPointError: The model's logits are no numbers; names the slots.
        """
        context, self._context = self._context, {}
        with self._void_slots.watch(batch):
            output = self._decoding.decode(batch, logits, self._slots.positions(batch))
            self._slots.remember(batch, output)
        return replace(output, context=context) if context else output

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
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


def _max_sequence_length(config: TorchEngineConfig, decoder: DecoderConfig) -> int:
    wanted = config.max_sequence_length
    if wanted is not None and wanted > decoder.max_positions:
        _logger.warning(
            "max_sequence_length is %d, but the model has %d positions", wanted, decoder.max_positions
        )
    return min(wanted or decoder.max_positions, decoder.max_positions)


def _num_blocks(
    config: TorchEngineConfig,
    decoder: DecoderConfig,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    on_gpu = device.type == "cuda"
    name = "kv_cache_free_gpu_mem_fraction" if on_gpu else "kv_cache_free_cpu_mem_fraction"
    size = block_bytes(decoder, config.tokens_per_block, dtype)
    plan = plan_kv_cache(
        KvCacheDemand(
            block_bytes=size,
            tokens_per_block=config.tokens_per_block,
            max_num_sequences=config.max_num_sequences,
            max_sequence_length=max_sequence_length,
            free_bytes=free_memory(device),
            fraction=getattr(config, name),
            fraction_name=name,
            max_tokens=config.max_tokens_in_paged_kv_cache,
            bounded_by_use=not on_gpu,
        )
    )
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB; %s decides",
        plan.num_blocks,
        config.tokens_per_block,
        plan.num_blocks * size / 2**20,
        plan.decided_by,
    )
    return plan.num_blocks
