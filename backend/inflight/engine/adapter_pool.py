"""LoRA adapters in torch's operators: their device memory, and their contribution to linear layers.

The memory is divided into pages. A page stores a few ranks of every linear layer; an adapter of higher rank
occupies several pages. A batch multiplies with the pages of all its rows' adapters at once, in two products per
linear layer for any number of adapters. After the first product, A x, each row's results for pages of other
adapters are set to zero.

    y = m * (W x + B (A x)) + bias        m is 1 except for DoRA

The scheduler decides which adapter is in which pages (`AdapterLoad`). Loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inflight.adapters.lora_modules import Module, module_sizes, projections
from inflight.core.schedule.batch import AdapterLoad
from inflight.engine.host_memory import zeros
from inflight.engine.low_rank import LowRank, low_rank_layers
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import LayerWeights, Linear
from inflight.models.sharding import Part
from inflight.sampling.transfer import upload

_NO_OWNER = -2  # owner of a page without an adapter; -1 stands for a row without an adapter


@dataclass(frozen=True, slots=True)
class LinearPages:
    """The pages of one `Linear`, which consists of several modules side by side: views into the pool's memory.

    Attributes:
        modules: The modules, in the order of the outputs.
        widths: Number of outputs of each module.
        a: [pages, modules, page_rank, in].
        b: [pages, page_rank, out], with all modules side by side.
        magnitudes: [pages + 1, out], DoRA's m in the row of an adapter's first page; the last row is all 1.
    """

    modules: tuple[Module, ...]
    widths: tuple[int, ...]
    a: Tensor
    b: Tensor
    magnitudes: Tensor

    def put(self, module: Module, low_rank: LowRank) -> None:
        """Write an adapter's matrices into these pages, which belong to it alone and are zero.

        Raises:
            ValueError: The matrices' rank is too large for the pages.
        """
        index = self.modules.index(module)
        begin = sum(self.widths[:index])
        outputs = slice(begin, begin + self.widths[index])
        num_pages, _, page_rank, inner = self.a.shape
        if low_rank.rank > num_pages * page_rank:
            raise ValueError(f"rank {low_rank.rank} is more than {num_pages} pages of {page_rank} ranks hold")
        a, b = low_rank.a.to(self.a.dtype), low_rank.b.to(self.b.dtype)
        if not b.isfinite().all():
            # Zero times infinity is NaN: from B it would reach every row of a batch. From A it reaches the rows of
            # this adapter only, as it should.
            a, b = torch.full_like(a, torch.nan), torch.zeros_like(b)
        padding = (0, 0, 0, num_pages * page_rank - low_rank.rank)
        self.a[:, index] = F.pad(a, padding).view(num_pages, page_rank, inner)
        self.b[:, :, outputs] = F.pad(b.T, padding).view(num_pages, page_rank, -1)
        if low_rank.magnitude is not None:
            self.magnitudes[0, outputs] = low_rank.magnitude.to(self.magnitudes.dtype)

    def add(self, y: Tensor, x: Tensor, active: ActiveAdapters) -> None:
        """Add B (A x) of each row's adapter to y, in place; x [rows, in], y [rows, out]."""
        a = self.a.index_select(0, active.pages)
        b = self.b.index_select(0, active.pages).flatten(0, 1)
        reduced = F.linear(x, a.flatten(0, 2)).view(len(x), *a.shape[:3])
        reduced = reduced.masked_fill(active.is_others, 0).transpose(1, 2).flatten(2)
        parts = reduced.unbind(1), b.split_with_sizes(self.widths, 1), y.split_with_sizes(self.widths, 1)
        for part, part_b, part_y in zip(*parts):
            part_y.addmm_(part, part_b)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The adapter pages of a layer's linear layers; None for a linear layer that adapters cannot change."""

    qkv: LinearPages | None = None
    query_up: LinearPages | None = None
    output: LinearPages | None = None
    recurrent_input: LinearPages | None = None
    recurrent_output: LinearPages | None = None
    up: LinearPages | None = None
    down: LinearPages | None = None

    def all(self) -> tuple[LinearPages, ...]:
        """Return the linear layers' pages in the order of computation."""
        linears = (
            *(self.qkv, self.query_up, self.output, self.recurrent_input, self.recurrent_output),
            *(self.up, self.down),
        )
        return tuple(each for each in linears if each is not None)


@dataclass(frozen=True, slots=True)
class ActiveAdapters:
    """The adapters of a batch's rows.

    Attributes:
        layers: Pages of each of this rank's layers.
        pages: [n] int64 on the device: all pages of these adapters.
        is_others: [rows, n, 1, 1] bool: True where a page belongs to another adapter than the row's.
        magnitude_rows: [rows] int64: index into `LinearPages.magnitudes` for each row; None: all magnitudes are 1.
    """

    layers: Sequence[LayerPages]
    pages: Tensor
    is_others: Tensor
    magnitude_rows: Tensor | None = None

    @classmethod
    def of_rows(
        cls,
        layers: Sequence[LayerPages],
        adapters: Tensor,
        pages: Tensor,
        owners: Tensor,
        magnitude_rows: Tensor | None = None,
    ) -> ActiveAdapters:
        """Create the adapters of a batch from tensors on the device: `adapters` [rows], the first page of each
        row's adapter, and `pages` and `owners` [n]."""
        is_others = (adapters[:, None] != owners)[:, :, None, None]
        return cls(layers, pages, is_others, magnitude_rows)

    def adapt(self, index: int, layer: LayerWeights) -> LayerWeights:
        """Return layer `index` of this rank's layers, with linear layers that apply these adapters."""
        pages, latent, beside = self.layers[index], layer.latent, layer.recurrent_projections
        into, out = pages.qkv, pages.output
        if beside is not None:
            first, last = beside
            beside = self._adapt(first, pages.recurrent_input), self._adapt(last, pages.recurrent_output)
        elif layer.recurrent is not None:
            into, out = pages.recurrent_input, pages.recurrent_output
        return replace(
            layer,
            recurrent_projections=beside,
            latent=latent
            and replace(latent, query_up=latent.query_up and self._adapt(latent.query_up, pages.query_up)),
            input_projection=layer.input_projection and self._adapt(layer.qkv, into),
            output_projection=layer.output_projection and self._adapt(layer.output, out),
            up=layer.up and self._adapt(layer.up, pages.up),
            down=layer.down and self._adapt(layer.down, pages.down),
        )

    def _adapt(self, linear: Linear, pages: LinearPages | None) -> Linear:
        if pages is None:
            return linear
        return AdaptedLinear(linear.weight, linear.bias, of=linear, pages=pages, active=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear(Linear):
    """A `Linear` that adds the output of each row's adapter to its product, before the bias."""

    of: Linear
    pages: LinearPages
    active: ActiveAdapters

    def __call__(self, x: Tensor) -> Tensor:
        y = replace(self.of, bias=None)(x)
        self.pages.add(y, x, self.active)
        if self.active.magnitude_rows is not None:
            y *= self.pages.magnitudes.index_select(0, self.active.magnitude_rows)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class _Loaded:
    pages: tuple[int, ...]
    has_magnitudes: bool


@dataclass(frozen=True, slots=True)
class FoundPages:
    """The adapter pages that a batch needs, on the host.

    Attributes:
        pages: Page ids of all adapters.
        owners: For each page, the first page of its adapter.
        magnitude_rows: See `ActiveAdapters.magnitude_rows`.
    """

    pages: NDArray[np.int64]
    owners: NDArray[np.int64]
    magnitude_rows: NDArray[np.int64] | None

    def padded(self, count: int) -> NDArray[np.int64]:
        """Return `count` pages followed by their `count` owners, as one array.

        Both parts are padded: pages with page 0, owners with an owner that no row has.
        """
        filled = np.zeros((2, count), dtype=np.int64)
        filled[1] = _NO_OWNER
        filled[:, : len(self.pages)] = self.pages, self.owners
        return filled.reshape(-1)


class AdapterPool:
    """Memory for adapters of one rank's part of a model.

    On a CPU, pages that are never written take no physical memory.

    Args:
        config: Configuration of the whole model.
        part: This rank's part of it.
        num_pages: Number of pages, at least one.
        page_rank: Number of LoRA ranks that a page stores.
        dtype: Data type of the layers.
        device: The device of the layers.
        max_active_rank: Maximum sum of ranks of the adapters in one computation; None: no limit.

    Attributes:
        num_pages: The argument of the same name.
        page_rank: The argument of the same name.
        max_active_rank: The argument of the same name.
        layers: The pages of each of this rank's layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        part: Part,
        num_pages: int,
        page_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        max_active_rank: int | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_rank = page_rank
        self.max_active_rank = max_active_rank
        self._config, self._part = config, part
        self._shapes = _LayerShapes(part.held_config(config), page_rank)
        self._device = device
        self._memory = _zeros((num_pages, self._shapes.page_size), dtype, device)
        self._magnitudes = _zeros((num_pages + 1, self._shapes.num_outputs), dtype, device)
        self._magnitudes[num_pages] = 1
        self.layers = self._shapes.layers(self._memory, self._magnitudes)
        self._loaded: dict[int, _Loaded] = {}

    def load(self, load: AdapterLoad) -> None:
        """Load an adapter into its pages, after all work queued on the device."""
        taken = set(load.pages)
        self._loaded = {first: each for first, each in self._loaded.items() if taken.isdisjoint(each.pages)}
        memory = torch.zeros((len(load.pages), self._shapes.page_size), dtype=self._memory.dtype)
        magnitudes = torch.ones((1, self._shapes.num_outputs), dtype=self._memory.dtype)
        layers = self._shapes.layers(memory, magnitudes)
        has_magnitudes = False
        for index, modules in low_rank_layers(load.adapter.weights, self._config, self._part).items():
            for linear in layers[index].all():
                for module in modules.keys() & set(linear.modules):
                    linear.put(module, modules[module])
                    has_magnitudes |= modules[module].magnitude is not None
        pages = upload(np.array(load.pages), self._device)
        self._memory.index_copy_(0, pages, _send(memory, self._device))
        if has_magnitudes:
            self._magnitudes.index_copy_(0, pages[:1], _send(magnitudes, self._device))
        self._loaded[load.pages[0]] = _Loaded(load.pages, has_magnitudes)

    def find(self, adapters: NDArray[np.int64]) -> FoundPages:
        """Return the pages of the adapters of rows; `adapters` [rows] has the first page of each row's adapter,
        or -1 for a row without one.

        Raises:
            ValueError: A row's adapter is not loaded.
        """
        firsts = sorted({*adapters.tolist()} - {-1})
        if missing := [first for first in firsts if first not in self._loaded]:
            raise ValueError(
                f"a row's adapter should begin in page {missing[0]}, but no adapter begins there"
            )
        loaded = [self._loaded[first] for first in firsts]
        pages = [page for each in loaded for page in each.pages]
        owners = [each.pages[0] for each in loaded for _ in each.pages]
        magnitude_rows = None
        if with_magnitudes := [each.pages[0] for each in loaded if each.has_magnitudes]:
            magnitude_rows = np.where(np.isin(adapters, with_magnitudes), adapters, self.num_pages)
        return FoundPages(np.array(pages, np.int64), np.array(owners, np.int64), magnitude_rows)

    def activate(self, adapters: NDArray[np.int64]) -> ActiveAdapters:
        """Return the active adapters of a batch, at least one of whose rows has an adapter; `adapters` as in
        `find`.

        Raises ValueError like `find`.
        """
        found = self.find(adapters)
        parts = [adapters, found.pages, found.owners]
        if found.magnitude_rows is not None:
            parts.append(found.magnitude_rows)
        on_device = upload(np.concatenate(parts), self._device).split_with_sizes(
            [len(part) for part in parts]
        )
        return ActiveAdapters.of_rows(self.layers, *on_device)


@dataclass(frozen=True, slots=True)
class _LinearShape:
    """The modules of a `Linear` and their widths."""

    modules: tuple[Module, ...]
    inner: int
    widths: tuple[int, ...]


class _LayerShapes:
    """The layout of a page: the offset of every matrix in it.

    Attributes:
        page_size: Number of elements of a page.
        num_outputs: Number of outputs of all linear layers; an adapter has as many DoRA magnitudes.
    """

    def __init__(self, held: DecoderConfig, page_rank: int) -> None:
        self._shapes = [
            {
                name: _LinearShape(
                    modules, sizes[modules[0]].inner, tuple(sizes[module].outer for module in modules)
                )
                for name, modules in projections(held, layer).items()
            }
            for layer in range(held.num_layers)
            for sizes in (module_sizes(held, layer),)
        ]
        self._page_rank = page_rank
        shapes = [shape for layer in self._shapes for shape in layer.values()]
        self.num_outputs = sum(sum(shape.widths) for shape in shapes)
        num_inputs = sum(len(shape.modules) * shape.inner for shape in shapes)
        self.page_size = page_rank * (num_inputs + self.num_outputs)

    def layers(self, memory: Tensor, magnitudes: Tensor) -> list[LayerPages]:
        """Return views of `memory` [pages, page_size] and `magnitudes` [rows, num_outputs]."""
        begin = first_output = 0
        layers: list[LayerPages] = []
        for shapes in self._shapes:
            linears: dict[str, LinearPages] = {}
            for name, shape in shapes.items():
                count, outputs = len(shape.modules), sum(shape.widths)
                middle = begin + count * self._page_rank * shape.inner
                end = middle + self._page_rank * outputs
                a = torch.unflatten(memory[:, begin:middle], 1, (count, self._page_rank, shape.inner))
                b = torch.unflatten(memory[:, middle:end], 1, (self._page_rank, outputs))
                of_linear = magnitudes[:, first_output : first_output + outputs]
                linears[name] = LinearPages(shape.modules, shape.widths, a, b, of_linear)
                begin, first_output = end, first_output + outputs
            layers.append(LayerPages(**linears))
        return layers


def page_bytes(held: DecoderConfig, page_rank: int, dtype: torch.dtype) -> int:
    """Return the size of an adapter page on this rank in bytes, DoRA magnitudes included."""
    shapes = _LayerShapes(held, page_rank)
    return (shapes.page_size + shapes.num_outputs) * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` asynchronously."""
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)
