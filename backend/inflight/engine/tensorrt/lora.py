"""LoRA adapters in a network: the concatenated matrices of all adapters of a batch, as inputs.

    y += B (A x where mask, else 0)     A [ranks, in], B [out, ranks], mask [rows, ranks]

`ranks` is the sum of all adapters' ranks, possibly 0. The mask is 1 where a rank belongs to the row's own adapter.
The results of other ranks may be infinite, so they are replaced by 0 instead of multiplied by 0.
"""

from __future__ import annotations

from typing import Any

from inflight.adapters.lora_modules import module_sizes, projections
from inflight.engine.tensorrt.graph import Graph
from inflight.engine.tensorrt.sidecar import Settings
from inflight.models import DecoderConfig


class NetworkAdapters:
    """The adapter inputs of a network; a network that is built without adapters has none.

    Args:
        graph: The graph in which the inputs are defined.
        held: Configuration of this rank's part of the model.
        settings: The build's settings.
        order: [rows], the index in the batch of each row.
    """

    def __init__(self, graph: Graph, held: DecoderConfig, settings: Settings, order: Any) -> None:
        self._graph, self._dtype, self._held = graph, settings.dtype, held
        self._is_own = None
        if settings.max_lora_rank:
            mask = graph.input("lora_mask", settings.dtype, ("T", "ranks"))
            self._is_own = graph.is_greater(graph.gather(mask, order), self._zero())

    def add(self, y: Any, x: Any, index: int, name: str) -> Any:
        """Add each row's adapter to y, the output of a layer's projection `name`; x is the projection's input."""
        modules = projections(self._held, index).get(name.rsplit(".", 1)[1], ())
        if self._is_own is None or not modules:
            return y
        graph, sizes = self._graph, module_sizes(self._held, index)
        parts: list[Any] = []
        for module in modules:
            size, which = sizes[module], f"{index}_{module.text}"
            a = graph.input(f"lora_a_{which}", self._dtype, ("ranks", size.inner))
            b = graph.input(f"lora_b_{which}", self._dtype, (size.outer, "ranks"))
            reduced = graph.select(self._is_own, graph.multiply_matrices(x, a), self._zero())
            parts.append(graph.multiply_matrices(reduced, b))
        return graph.add(y, graph.concat(parts, 1))

    def _zero(self) -> Any:
        return self._graph.constant(0, self._dtype, 2)
