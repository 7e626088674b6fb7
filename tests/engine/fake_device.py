"""A device that computes on the CPU: its tensors have values, and "meta" as their device.

As on a GPU, it is an error to mix its tensors with the CPU's. Everything that would make the host wait for a
GPU is recorded: copies to the host, blocking copies to the device, reads of values, operators whose result's
size depends on values, and events in the order of the device's operations. A copy to the host that does not
block has its values when a later event is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_SIZED_BY_VALUES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
    _aten.equal.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class _OnDevice(torch.Tensor):
    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> _OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=DEVICE
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of the device")


class FakeDevice(TorchDispatchMode):
    """The device exists while this context is entered.

    Attributes:
        waits: Operations that made the host wait, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._sent: list[tuple[Tensor, Tensor]] = []  # values, and the host's tensors that will have them

    def record_event(self, device: torch.device) -> _Event:
        """Replace `inflight.sampling.transfer.record_event`."""
        return _Event(self, len(self._sent))

    def arrive(self, count: int) -> None:
        """Wait until the first `count` copies to the host have arrived."""
        self.waits.append("an event")
        for target, values in self._sent[:count]:
            target.copy_(values)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_here = any(isinstance(tensor, _OnDevice) for tensor in tensors)
        target = kwargs.get("device")
        if function is _aten._to_copy.default and target is not None:
            return self._copy(function, args, kwargs, is_here, torch.device(target) == DEVICE)
        if function is _aten.copy_.default:
            return self._copy_into(*args, **kwargs)
        if target is not None and torch.device(target) == DEVICE:
            return _OnDevice(function(*tree_map(_values, args), **{**kwargs, "device": "cpu"}))
        if not is_here:
            return function(*args, **kwargs)
        self._check(function, tensors, args, kwargs)
        result = function(*tree_map(_values, args), **tree_map(_values, kwargs))
        if function._schema.is_mutable:
            return kwargs.get("out", args[0])
        return tree_map(lambda leaf: _OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _copy(
        self, function: Any, args: Any, kwargs: dict[str, Any], is_here: bool, comes_here: bool
    ) -> Tensor:
        if is_here and not comes_here and kwargs.get("non_blocking"):
            self._sent.append((torch.full_like(args[0].values, 0x55), args[0].values.clone()))
            return self._sent[-1][0]
        if is_here and not comes_here:
            self.waits.append("copy to the host")
        if comes_here and not is_here and not kwargs.get("non_blocking"):
            self.waits.append("copy to the device that blocks")
        values = function(*tree_map(_values, args), **{**kwargs, "device": "cpu"}).clone()
        return _OnDevice(values) if comes_here else values

    def _copy_into(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        there, here = isinstance(target, _OnDevice), isinstance(source, _OnDevice)
        if here and not there:
            self.waits.append("copy to the host")
        if there and not here and not non_blocking:
            self.waits.append("copy to the device that blocks")
        _values(target).copy_(_values(source))
        return target

    def _check(self, function: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        if any(tensor.dim() and not isinstance(tensor, _OnDevice) for tensor in tensors):
            raise RuntimeError(f"{function}: tensors of two devices")
        if function is _aten._local_scalar_dense.default:
            self.waits.append("a value is asked for")
        if function in _SIZED_BY_VALUES and kwargs.get("output_size") is None:
            self.waits.append(str(function))
        if function in _INDEXING:
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            self.waits += ["indexing by a mask"] * len(masks)


class _Event:
    def __init__(self, device: FakeDevice, count: int) -> None:
        self._device, self._count = device, count

    def synchronize(self) -> None:
        self._device.arrive(self._count)


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, _OnDevice) else leaf
