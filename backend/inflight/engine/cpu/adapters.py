"""LoRA adapters in the layout that the compiled products read, and the pages that each adapter occupies.

A module's delta, B (A x), is computed together with the product that contains the module: query, key and
value with qkv, gate and up with up. The modules' rows of A are stored one after the other. For B, every 16
columns of a product store only the ranks that change these columns: columns of the query store no ranks of the
key. Values have the dtype of activations, even if weights are int8. Each adapter has one block of memory, which is
freed with the adapter. Loop thread.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.adapters.lora_modules import Module, module_sizes, projections
from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.cpu.layout import HALF, PAIR_BYTES, PANEL, RANKS_AT_ONCE
from inflight.engine.cpu.packing import gated_order, in_order
from inflight.engine.cpu.structs import AdapterStruct, LayerAdapterStruct, LowRankStruct
from inflight.engine.host_memory import Recycled
from inflight.engine.low_rank import LowRank, low_rank_layers
from inflight.models import DecoderConfig
from inflight.models.sharding import Part
from inflight.sampling.transfer import as_array


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix product of a rank's layers, and the LoRA modules whose outputs are among its columns.

    Attributes:
        name: Name of the field of LayerAdapterStruct.
        modules: The modules in the order of the source's rows, with the number of rows of each.
        inner: Number of input values of a row.
        order: Source row of every packed column, -1 for padding columns.
    """

    name: str
    modules: tuple[tuple[Module, int], ...]
    inner: int
    order: Tensor

    @property
    def width(self) -> int:
        """Number of columns in whole panels."""
        return -(-len(self.order) // PANEL) * PANEL


@dataclass(frozen=True, slots=True)
class _LoraRankRange:
    """The LoRA ranks of one module among the ranks of its product: `count` pairs of ranks from pair `first` on."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """The place of a module's part of B in the packed B.

    Attributes:
        rows: [halves, 16], the row of B for every column of the half panels that contain the module; -1 for
            columns of other modules.
        at: [halves], index of the register with the first pair of ranks of each half panel.
    """

    rows: NDArray[np.int64]
    at: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _ColumnLayout:
    """The layout of a product's packed B, for modules with given ranks.

    Attributes:
        ranges: [width / 16, 3] int32, a RankRange of source/layer.h for every 16 columns.
        num_registers: Number of registers that B occupies.
        columns: Place of each module.
    """

    ranges: NDArray[np.int32]
    num_registers: int
    columns: dict[Module, _Columns]


@dataclass(frozen=True, slots=True)
class _ProductAdapter:
    """An adapter's low-rank matrices for a product of one layer, before they are packed.

    Attributes:
        layer: The layer among this rank's layers.
        product: The product of that layer.
        modules: The product's modules that the adapter changes.
        layout: The layout of B.
        ranks: Ranks of each module.
        num_ranks: Number of ranks of all modules, padded.
    """

    layer: int
    product: _Product
    modules: dict[Module, LowRank]
    layout: _ColumnLayout
    ranks: dict[Module, _LoraRankRange]
    num_ranks: int

    def num_registers_of_a(self, per_register: int) -> int:
        """Return the number of registers that A occupies; `per_register` is the number of values in a register."""
        return self.num_ranks * -(-self.product.inner // per_register)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the format of the compiled code.

    Attributes:
        pages: The pages that it occupies.
        struct: The adapter's struct, which points to the data in `kept`.
        kept: The objects that the struct points to.
    """

    pages: frozenset[int]
    struct: AdapterStruct
    kept: tuple[object, ...]

    @property
    def address(self) -> int:
        """Address in memory of `struct`, as the compiled code takes adapters."""
        return ctypes.addressof(self.struct)


class PackedAdapters:
    """The adapters in a decoder's pages.

    Args:
        library: The compiled code for this dtype of activations.
        config: Configuration of the whole model.
        part: This rank's part of it.
        dtype: Dtype of activations.
    """

    def __init__(self, library: ctypes.CDLL, config: DecoderConfig, part: Part, dtype: torch.dtype) -> None:
        self._library = library
        self._config = config
        self._part = part
        self._dtype = dtype
        self._pair = PAIR_BYTES // dtype.itemsize
        self._per_register = HALF * self._pair
        held = part.held_config(config)
        self._products = [_products(held, layer) for layer in range(held.num_layers)]
        self._memory = Recycled()
        self._by_page: dict[int, PackedAdapter] = {}

    def load(self, load: AdapterLoad) -> None:
        """Pack an adapter; discard adapters that occupied any of its pages, even if memory for the new one is
        lacking."""
        pages = frozenset(load.pages)
        for first in [page for page, adapter in self._by_page.items() if adapter.pages & pages]:
            del self._by_page[first]
        layers = low_rank_layers(load.adapter.weights, self._config, self._part)
        self._by_page[load.pages[0]] = self._pack(pages, self._find_parts(layers))

    def addresses(self, first_pages: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the addresses [rows] of adapters, given the first page of each row's adapter; 0 for -1, no
        adapter.

        Raises:
            ValueError: A page has no adapter.
        """
        known = {page: adapter.address for page, adapter in self._by_page.items()} | {-1: 0}
        try:
            return np.array([known[page] for page in first_pages.tolist()], dtype=np.uint64)
        except KeyError as error:
            raise ValueError(
                f"a row's adapter should begin in page {error}, but no adapter begins there"
            ) from None

    def _find_parts(self, layers: dict[int, dict[Module, LowRank]]) -> list[_ProductAdapter]:
        layouts: dict[tuple[object, ...], _ColumnLayout] = {}  # most layers have the same layouts
        parts: list[_ProductAdapter] = []
        for layer, of_layer in layers.items():
            for product in self._products[layer]:
                modules = {module: of_layer[module] for module, _ in product.modules if module in of_layer}
                if not modules:
                    continue
                ranks = self._place(modules)
                key = product.name, product.modules, tuple(ranks.items())
                if key not in layouts:
                    layouts[key] = _lay_out(product, ranks)
                num_ranks = self._pair * max(place.first + place.count for place in ranks.values())
                num_ranks = -(-num_ranks // RANKS_AT_ONCE) * RANKS_AT_ONCE
                parts.append(_ProductAdapter(layer, product, modules, layouts[key], ranks, num_ranks))
        return parts

    def _place(self, modules: dict[Module, LowRank]) -> dict[Module, _LoraRankRange]:
        """Return the ranks of each module; modules of a fused adapter have the same A, and so share ranks."""
        places: dict[Module, _LoraRankRange] = {}
        places_of_a: dict[int, _LoraRankRange] = {}
        num_pairs = 0
        for module, low_rank in modules.items():
            key = id(low_rank.a)
            if key not in places_of_a:
                places_of_a[key] = _LoraRankRange(num_pairs, -(-low_rank.rank // self._pair))
                num_pairs += places_of_a[key].count
            places[module] = places_of_a[key]
        return places

    def _pack(self, pages: frozenset[int], parts: list[_ProductAdapter]) -> PackedAdapter:
        begin, end = self._part.layers
        layers = (LayerAdapterStruct * (end - begin))()
        sizes = [
            size
            for part in parts
            for size in (part.num_registers_of_a(self._per_register), part.layout.num_registers)
        ]
        memory = self._memory.empty((sum(sizes), HALF), torch.int32).zero_()
        places = iter(memory.split_with_sizes(sizes))
        kept: list[object] = [memory, layers]
        for part in parts:
            a, b = next(places), next(places)
            self._pack_a(part, a)
            self._pack_b(part, b)
            struct = LowRankStruct(a.data_ptr(), b.data_ptr(), part.layout.ranges.ctypes.data)
            struct.ranks = part.num_ranks
            magnitude = _pack_magnitude(part)
            if magnitude is not None:
                struct.magnitude = magnitude.data_ptr()
            kept += [part.layout.ranges, magnitude]
            setattr(layers[part.layer], part.product.name, struct)
        most = max((part.num_ranks for part in parts), default=0)
        return PackedAdapter(pages, AdapterStruct(ctypes.addressof(layers), most), tuple(kept))

    def _pack_a(self, part: _ProductAdapter, target: Tensor) -> None:
        """Pack A into [ranks / 4, registers of inner, 4] registers."""
        for module, low_rank in part.modules.items():
            a = low_rank.a.to(self._dtype)
            first = part.ranks[module].first * self._pair
            self._library.pack_a(a.data_ptr(), a.stride(0), *a.shape, first, target.data_ptr())

    def _pack_b(self, part: _ProductAdapter, target: Tensor) -> None:
        """Pack B into registers of 16 pairs."""
        for module, low_rank in part.modules.items():
            b, columns = low_rank.b.to(self._dtype).contiguous(), part.layout.columns[module]
            rows, at = columns.rows.ctypes.data, columns.at.ctypes.data
            self._library.pack_b(b.data_ptr(), b.shape[1], rows, at, len(columns.at), target.data_ptr())


def _products(held: DecoderConfig, layer: int) -> tuple[_Product, ...]:
    """Return the products of a layer whose modules adapters may change."""
    sizes = module_sizes(held, layer)
    return tuple(
        _product(
            name,
            tuple((module, sizes[module].outer) for module in modules),
            sizes[modules[0]].inner,
            name == "up" and held.gated_mlp,
        )
        for name, modules in projections(held, layer).items()
    )


@cache
def _product(name: str, modules: tuple[tuple[Module, int], ...], inner: int, is_gated: bool) -> _Product:
    rows = sum(count for _, count in modules)
    return _Product(name, modules, inner, gated_order(rows) if is_gated else torch.arange(rows))


def _pack_magnitude(part: _ProductAdapter) -> Tensor | None:
    """Return DoRA's magnitudes [columns in whole panels]; None if all are 1."""
    if all(low_rank.magnitude is None for low_rank in part.modules.values()):
        return None
    parts: list[Tensor] = []
    for module, num_rows in part.product.modules:
        magnitude = part.modules[module].magnitude if module in part.modules else None
        parts.append(torch.ones(num_rows) if magnitude is None else magnitude.float())
    return in_order(torch.cat(parts), part.product.order, part.product.width)


def _lay_out(product: _Product, ranks: dict[Module, _LoraRankRange]) -> _ColumnLayout:
    """Return the layout of a product's packed B for the modules that the adapter changes."""
    order = np.full(product.width, -1, dtype=np.int64)
    order[: len(product.order)] = as_array(product.order)
    order = order.reshape(-1, HALF)
    rows: dict[Module, NDArray[np.int64]] = {}
    begin = 0
    for module, count in product.modules:
        rows[module] = np.where((order >= begin) & (order < begin + count), order - begin, -1)
        begin += count
    firsts = np.full(len(order), np.iinfo(np.int32).max, dtype=np.int64)
    ends = np.zeros(len(order), dtype=np.int64)
    for module, place in ranks.items():
        is_here = (rows[module] >= 0).any(axis=1)
        firsts[is_here] = np.minimum(firsts[is_here], place.first)
        ends[is_here] = np.maximum(ends[is_here], place.first + place.count)
    firsts = np.minimum(firsts, ends)
    counts = ends - firsts
    at = counts.cumsum() - counts
    columns: dict[Module, _Columns] = {}
    for module, place in ranks.items():
        halves = np.flatnonzero((rows[module] >= 0).any(axis=1))
        columns[module] = _Columns(rows[module][halves], at[halves] + place.first - firsts[halves])
    ranges = np.ascontiguousarray(np.stack([firsts, counts, at], axis=1).astype(np.int32))
    return _ColumnLayout(ranges, int(counts.sum()), columns)
