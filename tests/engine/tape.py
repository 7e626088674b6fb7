"""Records operations on a CPU as a CUDA graph does: a replay runs no Python, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed  # declares its operators
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALL_REDUCE = torch.ops.c10d.allreduce_.default


class Tape(TorchDispatchMode):
    """A `Capture`.

    Attributes:
        replayed: For every replay, the index of the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[int] = []
        self._num_recorded = 0
        self._operations: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        operations()
        self._operations = recorded = []
        with self:
            operations()
        index = self._num_recorded
        self._num_recorded += 1

        def replay() -> None:
            self.replayed.append(index)
            for function, args, kwargs, results in recorded:
                again = function(*args, **kwargs)
                for before, now in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if function is _ALL_REDUCE and not isinstance(now, Tensor):
                        Work.unbox(now).wait()
                    elif now.data_ptr() != before.data_ptr():  # neither a view nor in place
                        before.copy_(now)

        return replay

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host asks what a value is"
        results = function(*args, **(kwargs or {}))
        is_work = function is _ALL_REDUCE  # which also returns an object to wait for
        assert is_work or all(isinstance(leaf, Tensor) for leaf in tree_leaves(results)), function
        self._operations.append((function, args, kwargs or {}, results))
        return results
