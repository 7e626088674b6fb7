"""A decoder whose layers and logits are TensorRT plans, with the interface of `engine.layers.decoder.Decoder`.

The layers read and write the rows of a `RowCache`, from which new keys and values are copied to the blocks. All
other inputs and outputs of the plans are tensors, so a whole batch can be recorded. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from inflight.adapters.lora_modules import Module
from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.adapter_pool import ActiveAdapters, AdapterPool, LinearPages
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.collectives import ALONE, Collectives, join_logits
from inflight.engine.kv_cache import cache_places
from inflight.engine.packing import PackedBatch, TileLimits
from inflight.engine.tensorrt.plan_rows import (
    BatchPart,
    PartLimits,
    PlacedRows,
    PlanRows,
    cut_batch,
    fill_up,
    lay_out_for_plan,
    place_rows,
    tile_limits,
)
from inflight.engine.tensorrt.row_cache import RowCache
from inflight.engine.tensorrt.runtime import LoadedPlan
from inflight.engine.tensorrt.sidecar import Settings
from inflight.errors import StepFailed
from inflight.models import DecoderConfig
from inflight.models.sharding import Part
from inflight.sampling.row_kernels import RowKernels

_BY_TORCH = RowKernels()


class TensorRtDecoder:
    """The plans and their inputs.

    Args:
        config: Configuration of the whole model.
        part: This rank's part of it.
        settings: The settings of the build.
        layers: The plan from token ids to the last layer's output.
        head: The plan from the last layer's output to logits.
        cache: The row cache to which the layers are bound.
        collectives: Collectives over the ranks that share the layers.
        row_kernels: Kernels on rows of logits, for sampling.

    Attributes:
        config: The argument of the same name.
        dtype: Data type of activations and KV cache.
        adapters: The LoRA adapters on the device; None: adapters are not enabled.
        kernels: Name of the implementation of the layers.
        has_fixed_shapes: Whether batches of generation rows can be recorded.
        takes_fixed_rows: Whether batches with context chunks can be recorded.
        needs_cleared_blocks: Whether the previous content of a KV block may affect the next sequence that uses it.
        row_kernels: The argument of the same name.
    """

    kernels = "tensorrt"
    has_fixed_shapes = True
    takes_fixed_rows = True
    needs_cleared_blocks = False

    def __init__(
        self,
        config: DecoderConfig,
        part: Part,
        settings: Settings,
        layers: LoadedPlan,
        head: LoadedPlan,
        cache: RowCache,
        collectives: Collectives = ALONE,
        row_kernels: RowKernels = _BY_TORCH,
    ) -> None:
        self.config = config
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.adapters: AdapterPool | None = None
        self.row_kernels = row_kernels
        self._part = part
        self._settings = settings
        self._layers, self._head = layers, head
        self._collectives = collectives
        self._device = cache.device
        self._input_names = {spec.name for spec in layers.spec.inputs}
        for index in range(config.num_layers):
            keys, values = cache.layer(index)
            layers.bind({f"k_cache_{index}": keys, f"v_cache_{index}": values})

    def tile_limits(self, num_rows: int, num_chunks: int) -> TileLimits | None:
        """Return `plan_rows.tile_limits`; None if the rows exceed the plan's maximum or do not fit into its
        slots."""
        settings = self._settings
        if num_rows > min(settings.max_num_tokens, settings.max_batch_size * settings.max_seq_len):
            return None
        longest = min(settings.max_num_tokens, settings.max_seq_len)
        return tile_limits(num_rows, settings.max_context_chunks, longest)

    def forward(
        self,
        packed: PackedBatch,
        cache: RowCache,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
        active: ActiveAdapters | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; `hidden` is None, as there is only one stage."""
        count = len(packed.token_ids)
        if count == 0:
            return torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self._device)
        if packed.fixed is not None:
            null_slot = len(packed.block_tables) - 1
            rows = fill_up(
                packed.slots, packed.positions, packed.fixed, null_slot, cache.num_slots, cache.length
            )
            recording = count, len(packed.fixed.tiles), active is not None
            return self._run(packed, rows, BatchPart(0, count, ()), cache, active, recording)["hidden"]
        found = [self._run_part(packed, part, cache) for part in self._cut(packed)]
        if between is not None:
            for number in between.wanted:
                between.keep(number, torch.cat([each[f"hidden_states_{number}"] for each in found]))
        return found[0]["hidden"] if len(found) == 1 else torch.cat([each["hidden"] for each in found])

    def forward_to_logits(self, packed: PackedBatch, cache: RowCache, hidden: Tensor | None = None) -> Tensor:
        return self.logits(self.forward(packed, cache, hidden), packed.sampled_rows)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits of some rows: float32 [n, vocab_size].

        Args:
            hidden: The output of `forward`.
            rows: Indices of the rows in `hidden`: int64 [n].
        """
        logits = self._run_head(hidden[rows], "logits")
        return join_logits(logits, self.config.vocab_size, self._collectives)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to rows [n, hidden_size] of `forward`'s output."""
        return self._run_head(hidden, "normalized")

    def reserve_adapters(self, num_pages: int, page_rank: int) -> None:
        """Allocate pages for adapters, each for `page_rank` ranks, before the first adapter is loaded.

        At most once.
        """
        self.adapters = AdapterPool(
            self.config,
            self._part,
            num_pages,
            page_rank,
            self.dtype,
            self._device,
            self._settings.max_lora_rank,
        )

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter into its pages.

        Raises StepFailed for an adapter with magnitudes (DoRA), which plans do not support.
        """
        assert self.adapters is not None, "there are no pages for adapters"
        if any(len(row) > 3 and row[3] for row in load.adapter.weights.config):
            raise StepFailed(
                "the LoRA adapter has magnitudes (DoRA), which plans of TensorRT do not compute; expected one "
                "without, or the engine torch"
            )
        self.adapters.load(load)

    def _run_head(self, hidden: Tensor, name: str) -> Tensor:
        most = self._head.spec.most_rows("hidden")
        parts = [self._head.run({"hidden": each})[name] for each in torch.split(hidden, most) if len(each)]
        if not parts:
            spec = self._head.spec.tensor(name)
            return torch.empty((0, spec.shape[1]), dtype=getattr(torch, spec.dtype), device=self._device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cut(self, packed: PackedBatch) -> list[BatchPart]:
        """Divide the batch into parts that the plan can compute in one run."""
        ranks: dict[int, int] = {}
        if packed.adapters is not None and self.adapters is not None:
            found = self.adapters.find(packed.adapters)
            owners = found.owners.tolist()
            ranks = {owner: owners.count(owner) * self.adapters.page_rank for owner in set(owners)}
        settings = self._settings
        limits = PartLimits(settings.max_num_tokens, settings.max_context_chunks, settings.max_lora_rank)
        return cut_batch(packed.chunks, len(packed.token_ids), packed.adapters, ranks, limits)

    def _run_part(self, packed: PackedBatch, part: BatchPart, cache: RowCache) -> dict[str, Tensor]:
        rows = slice(part.begin, part.end)
        active = None
        if packed.adapters is not None and (packed.adapters[rows] >= 0).any():
            assert self.adapters is not None, "there are no pages for adapters"
            active = self.adapters.activate(packed.adapters[rows])
        placed = place_rows(packed.slots[rows], packed.positions[rows], part.chunks)
        return self._run(packed, placed, part, cache, active, None)

    def _run(
        self,
        packed: PackedBatch,
        rows: PlacedRows,
        part: BatchPart,
        cache: RowCache,
        active: ActiveAdapters | None,
        recording: Hashable,
    ) -> dict[str, Tensor]:
        """Run the layers on a part, and copy its new keys and values from the cache's rows to the blocks."""
        plan_rows = lay_out_for_plan(rows, cache.num_slots)
        inputs = {each.name: getattr(plan_rows, each.name) for each in fields(PlanRows)}
        inputs["position_ids"] = rows.positions.int()
        inputs |= self._tokens(packed, part)
        if self._settings.max_lora_rank:
            inputs |= self._adapter_inputs(part.end - part.begin, active)
        outputs = self._layers.run(
            {name: inputs[name] for name in inputs.keys() & self._input_names}, recording
        )
        places = cache_places(packed, cache.tokens_per_block)[part.begin : part.end]
        cache.write_through(rows.slots, rows.positions, places)
        return outputs

    def _tokens(self, packed: PackedBatch, part: BatchPart) -> dict[str, Tensor]:
        """Return the inputs for embeddings: token ids, and for each row its token's embedding or a prompt
        table's row."""
        token_ids = packed.token_ids[part.begin : part.end]
        count = part.end - part.begin
        own = torch.arange(count, device=self._device)
        virtual = packed.virtual
        if virtual is None or not part.chunks:  # only chunks have rows of prompt tables
            embeddings = torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self._device)
            return {
                "input_ids": token_ids.int(),
                "embedding_gather": own.int(),
                "virtual_embeddings": embeddings,
            }
        numbers = torch.arange(len(virtual.rows), device=self._device)
        of_table = torch.full_like(packed.token_ids, -1).index_copy_(0, virtual.rows, numbers)
        of_table = of_table[part.begin : part.end]
        return {
            "input_ids": torch.where(of_table < 0, token_ids, 0).int(),
            "embedding_gather": torch.where(of_table < 0, own, count + own).int(),
            # One embedding for each row of the part: the whole batch's may exceed the plan's maximum.
            "virtual_embeddings": virtual.embeddings[of_table.clamp(min=0)],
        }

    def _adapter_inputs(self, count: int, active: ActiveAdapters | None) -> dict[str, Tensor]:
        """Return the adapters' inputs of a plan: their pages, and a mask that selects each row's own adapter."""
        assert self.adapters is not None or active is None
        names = self._input_names
        if active is None:
            found = {"lora_mask": torch.empty((count, 0), dtype=self.dtype, device=self._device)}
            for spec in self._layers.spec.inputs:
                if spec.name.startswith(("lora_a_", "lora_b_")):
                    shape = [0 if size == -1 else size for size in spec.shape]
                    found[spec.name] = torch.empty(shape, dtype=self.dtype, device=self._device)
            return found
        assert self.adapters is not None
        is_own = ~active.is_others.flatten(1)
        found = {"lora_mask": is_own.repeat_interleave(self.adapters.page_rank, dim=1).to(self.dtype)}
        for layer, pages in enumerate(active.layers):
            for linear in pages.all():
                for module, a, b in _banks(linear, active.pages):
                    if f"lora_a_{layer}_{module.text}" in names:
                        found[f"lora_a_{layer}_{module.text}"] = a
                        found[f"lora_b_{layer}_{module.text}"] = b
        return found


def _banks(linear: LinearPages, pages: Tensor) -> Sequence[tuple[Module, Tensor, Tensor]]:
    """Yield the matrices A [ranks, in] and B [out, ranks] of each module, from all of `pages`."""
    a = linear.a.index_select(0, pages).transpose(0, 1)
    b = linear.b.index_select(0, pages).flatten(0, 1).T.split_with_sizes(linear.widths)
    return [
        (module, of_module.flatten(0, 1).contiguous(), out.contiguous())
        for module, of_module, out in zip(linear.modules, a, b, strict=True)
    ]
