"""The interfaces that a ModelRunner needs: of a decoder, and of a KV cache.

`layers/decoder.py`, `cpu/decoder.py` and `layers/transformers_decoder.py` compute layers over `kv_cache.py`;
`tensorrt/` has a decoder and a cache of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import AdapterLoad, ScheduledBatch
from inflight.engine.adapter_pool import ActiveAdapters, AdapterPool
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.kv_cache import Numbers
from inflight.engine.packing import PackedBatch, TileLimits
from inflight.engine.recurrent.states import RecurrentStates
from inflight.models import DecoderConfig
from inflight.sampling.row_kernels import RowKernels


class RunnerDecoder(Protocol):
    """The interface of a decoder for a ModelRunner; `Decoder` documents each member."""

    config: DecoderConfig
    dtype: torch.dtype

    @property
    def row_kernels(self) -> RowKernels:
        """Computes over rows of logits when tokens are chosen."""
        ...

    @property
    def kernels(self) -> str:
        """The implementation that computes the layers."""
        ...

    @property
    def needs_cleared_blocks(self) -> bool:
        """Whether what a KV block held before may reach a sequence that takes it over."""
        ...

    def forward(
        self,
        packed: PackedBatch,
        cache: Any,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
    ) -> Tensor:
        """The last layer's output, of the cache's own kind."""
        ...

    def forward_to_logits(self, packed: PackedBatch, cache: Any, hidden: Tensor | None = None) -> Tensor:
        """`logits` of the rows that choose tokens."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The logits of `rows` of the hidden states that `forward` returned."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """The final norm of what `forward` returned."""
        ...

    def load_adapter(self, load: AdapterLoad) -> None:
        """Put an adapter into its pages."""
        ...


class RecordedDecoder(RunnerDecoder, Protocol):
    """The further members of a decoder that `IterationGraphs` uses; `Decoder` documents each."""

    adapters: AdapterPool | None

    @property
    def takes_fixed_rows(self) -> bool:
        """Whether batches with chunks can be recorded, too."""
        ...

    def tile_limits(self, num_rows: int, num_chunks: int) -> TileLimits | None:
        """The tile limits of a recorded batch with so many rows and about so many chunks; None if it is too
        large.

        Asked only where `takes_fixed_rows`.
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
        """The last layer's output, of these adapters."""
        ...


class BlockCache(Protocol):
    """The interface of a KV cache for a ModelRunner."""

    null_block: int

    @property
    def states(self) -> RecurrentStates | None:
        """The recurrent states of slots, if the model has any."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the cache is on."""
        ...

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give each target block what its source holds."""
        ...

    def clear(self, block_ids: Tensor) -> None:
        """Zero blocks."""
        ...

    def prepare(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> None:
        """Called before every forward pass, behind the batch's block copies: get ready what its rows read.

        Args:
            batch: What runs.
            num_tokens: [slots]: how many tokens of each slot the cache has.
        """
        ...

    def forget(self, batch: ScheduledBatch) -> None:
        """The batch has failed: what its forward pass has written is not known."""
        ...

    def has_room_beside(self, slots: Numbers, positions: Numbers, num_rows: int) -> bool:
        """Whether `num_rows` of the null slot can be written in one batch with these slots' rows."""
        ...
