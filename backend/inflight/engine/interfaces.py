"""The interfaces of a ModelRunner's decoder and KV cache.

`layers/decoder.py`, `cpu/decoder.py` and `layers/transformers_decoder.py` compute layers over `kv_cache.py`;
`tensorrt/` has its own decoder and cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import AdapterLoad, ScheduledBatch
from inflight.engine.adapter_pool import ActiveAdapters, AdapterPool
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.block_memory import CacheBytes
from inflight.engine.collectives import Collectives
from inflight.engine.kv_cache import KvCache, Numbers
from inflight.engine.packing import PackedBatch, TileLimits
from inflight.engine.recurrent.states import RecurrentStates
from inflight.engine.rotary_tables import RotaryTables
from inflight.engine.slots import SlotTable
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import Norm
from inflight.models.sharding import Part
from inflight.sampling.row_kernels import RowKernels


class RunnerDecoder(Protocol):
    """The interface of a decoder for a ModelRunner; `Decoder` documents each member."""

    config: DecoderConfig
    dtype: torch.dtype

    @property
    def row_kernels(self) -> RowKernels:
        """Kernels on rows of logits, for sampling."""
        ...

    @property
    def kernels(self) -> str:
        """Name of the implementation of the layers."""
        ...

    @property
    def needs_cleared_blocks(self) -> bool:
        """Whether the previous content of a KV block may affect the next sequence that uses the block."""
        ...

    def forward(
        self,
        packed: PackedBatch,
        cache: Any,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
    ) -> Tensor:
        """Return the output of this rank's last layer [rows, hidden_size], or before the last stage what the next
        stage needs [rows, `DecoderConfig.stage_width`], and fill the cache."""
        ...

    def forward_to_logits(self, packed: PackedBatch, cache: Any, hidden: Tensor | None = None) -> Tensor:
        """Compute the layers as `forward` does, and return the logits of the sampled rows [n, vocab_size]."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] of `forward`'s output `hidden` at the indices `rows` [n]."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to `forward`'s output."""
        ...

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter into its pages."""
        ...


class RecordedDecoder(RunnerDecoder, Protocol):
    """The additional members of a decoder that `IterationGraphs` uses; see `Decoder`."""

    adapters: AdapterPool | None

    @property
    def takes_fixed_rows(self) -> bool:
        """Whether batches with chunks can be recorded too."""
        ...

    def tile_limits(self, num_rows: int, num_chunks: int) -> TileLimits | None:
        """Return the tile limits of a recorded batch with `num_rows` rows and about `num_chunks` chunks; None
        if the batch is too large to be recorded.

        Called only if `takes_fixed_rows`.
        """
        ...

    def forward(
        self,
        packed: PackedBatch,
        cache: Any,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
        active: ActiveAdapters | None = None,
    ) -> Tensor:
        """Return the last layer's output as `RunnerDecoder.forward` does, with the `active` adapters."""
        ...


class DraftedModel(Protocol):
    """The interface of a model's decoder for its draft head; `Decoder` documents each member."""

    config: DecoderConfig
    part: Part
    collectives: Collectives
    max_sequence_length: int

    def embed(self, packed: PackedBatch) -> Tensor:
        """Return the rows' embeddings [rows, hidden_size]."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to `forward`'s output."""
        ...

    def logits_after(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states [n, hidden_size] to logits [n, vocab_size] float32, which applies
        `norm` and the output projection."""
        ...


class DraftLayer(Protocol):
    """The interface of the decoder of a draft head's only layer; `Decoder` documents each member."""

    kernels: str

    def fill(self, packed: PackedBatch, cache: KvCache, hidden: Tensor) -> None:
        """Store the keys and values of rows, given the layer's input [rows, hidden_size]."""
        ...

    def forward(
        self, packed: PackedBatch, cache: KvCache, hidden: Tensor, *, read: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output, given its input, [rows, hidden_size] each, and fill the cache.

        `read` is attention's input, if it is not the input's norm, [rows, 2 * hidden_size].
        """
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, any] of `forward`'s output at the indices `rows` [n], if the head has its own
        output projection."""
        ...


class DraftGuesser(Protocol):
    """The interface of a draft head for a ModelRunner; `layers/draft_head.py` documents it."""

    def fill(
        self, packed: PackedBatch, slots: Sequence[int], hidden: Tensor, between: Mapping[int, Tensor]
    ) -> None:
        """Store what later guesses need of the rows of `slots`, given hidden states after the last layer and after
        `Eagle3Config.read_layers`, each [rows, hidden_size]."""
        ...

    def guess(self, batch: ScheduledBatch, slots: SlotTable, rotary: RotaryTables) -> Sequence[int]:
        """Return the tokens in place of GUESSED_ON_DEVICE, for `ScheduledBatch.with_guesses`."""
        ...

    def clear(self, block_ids: Tensor) -> None:
        """Zero the head's part of blocks [n] that a sequence is about to use."""
        ...


class BlockCache(Protocol):
    """The interface of a KV cache for a ModelRunner."""

    null_block: int
    num_blocks: int

    @property
    def states(self) -> RecurrentStates | None:
        """Recurrent states of the slots; None for a model without recurrent layers."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the cache is on."""
        ...

    def as_bytes(self) -> CacheBytes | None:
        """Return blocks and snapshots as bytes; None if blocks cannot be read and written one by one."""
        ...

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy each source block to its target block."""
        ...

    def clear(self, block_ids: Tensor) -> None:
        """Fill blocks with zeros, so that no sequence reads another one's keys and values."""
        ...

    def prepare(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> None:
        """Prepare the data that the batch's rows read; called before every forward pass, after the batch's block
        copies.

        Args:
            batch: The batch.
            num_tokens: [slots] number of tokens of each slot in the cache.
        """
        ...

    def forget(self, batch: ScheduledBatch) -> None:
        """Handle a failed batch, whose forward pass may have written anything into its blocks and states."""
        ...

    def has_room_beside(self, slots: Numbers, positions: Numbers, num_rows: int) -> bool:
        """Whether `num_rows` padding rows, of the null slot, fit into one batch with rows of these slots."""
        ...
