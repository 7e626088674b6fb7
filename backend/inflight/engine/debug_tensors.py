"""Debug tensors: the inputs and logits of each iteration's forward pass, for inspection.

They are written to files, or the last iterations' are kept in memory. Each rank records its own tensors.
Independent of the device. The loop thread writes; any thread may read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.config import DEBUG_INPUTS, DEBUG_OUTPUTS, EngineConfig
from inflight.engine.packing import PackedBatch
from inflight.sampling.transfer import as_array

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IterationTensors:
    """The recorded tensors of one iteration.

    Attributes:
        iter: Number of the iteration.
        debug_tensors: Tensors by name, in the order of packed rows: `input_ids` and `positions` [rows] int32, and
            `sequence_length` [sequences] int32, the number of each sequence's tokens that are computed after this
            iteration. At the last stage also `logits` [sampled rows, vocab_size] float32, the model's logits
            before any sampling control.
    """

    iter: int
    debug_tensors: Mapping[str, NDArray[Any]]


class DebugTensors:
    """Records tensors of every iteration.

    Args:
        names: Names of the tensors.
        max_iterations: Number of iterations to keep in memory; 0: all iterations are written to files.
        folder: The folder for the files. It need not exist; an existing one must belong to this user and not be
            writable for others, who could plant links there.
        rank: Names of the nested folders below `folder` for this rank's files, `iteration_<number>/<tensor>.npy`.
    """

    def __init__(
        self, names: frozenset[str], max_iterations: int, folder: Path, rank: tuple[str, ...] = ()
    ) -> None:
        self._names: frozenset[str] = names
        self._folder = None if max_iterations else folder
        self._rank = rank
        self._lock = threading.Lock()
        self._kept: deque[IterationTensors] = deque(maxlen=max_iterations)

    @classmethod
    def from_config(cls, config: EngineConfig, pp_rank: int, tp_rank: int) -> DebugTensors | None:
        """Return the debug tensors that the parameters ask for; None if they ask for none.

        Each rank has its own folder, numbered from 1.
        """
        names = {
            *config.debug_tensor_names,
            *(DEBUG_INPUTS if config.debug_input_tensors else ()),
            *(DEBUG_OUTPUTS if config.debug_output_tensors else ()),
        }
        if not names:
            return None
        folder, rank = Path(config.debug_tensors_dir), (f"PP_{pp_rank + 1}", f"TP_{tp_rank + 1}")
        most = config.debug_tensors_max_iterations
        where = (
            f"are kept for the last {most} iterations"
            if most
            else f"of every iteration go to {folder.joinpath(*rank)}"
        )
        _log.warning("debug tensors (%s) %s: this is slow", ", ".join(sorted(names)), where)
        return cls(frozenset(names), most, folder, rank)

    def write(self, iteration: int, packed: PackedBatch, logits: Tensor | None) -> None:
        """Record an iteration; waits for the device.

        Args:
            iteration: The iteration's number.
            packed: The iteration's packed rows.
            logits: Logits in the order of `packed.sampled_rows`; None before the last stage.
        """
        if not self._names:
            return
        tensors = {
            "input_ids": lambda: packed.token_ids.int(),
            "positions": lambda: packed.positions.int(),
            "sequence_length": lambda: (packed.positions[packed.bounds[1:] - 1] + 1).int(),
        }
        if logits is not None:
            tensors["logits"] = lambda: logits[packed.sampled_rows.argsort()]
        found = {name: as_array(make().cpu()).copy() for name, make in tensors.items() if name in self._names}
        if self._folder is not None:
            self._save(self._folder, (*self._rank, f"iteration_{iteration}"), found)
            return
        with self._lock:
            self._kept.append(IterationTensors(iteration, found))

    def latest(self) -> list[IterationTensors]:
        """Return the iterations recorded since the last call, oldest first; empty if they are written to files."""
        with self._lock:
            kept = list(self._kept)
            self._kept.clear()
        return kept

    def _save(self, root: Path, below: tuple[str, ...], found: Mapping[str, NDArray[Any]]) -> None:
        try:
            with _opened(root, below) as folder:
                for name, values in found.items():
                    with _created(f"{name}.npy", folder) as file:
                        np.save(file, values)
        except OSError as error:  # a full disk must not fail requests
            _log.error("debug tensors are not written any more: debug_tensors_dir %s: %s", root, error)
            self._names = frozenset()


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def _opened(root: Path, below: tuple[str, ...]) -> Generator[int]:
    """Open a folder below `root`, created if missing, and yield its descriptor.

    Raises OSError if others could plant links in the folder."""
    root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        folder = None
        for name in (str(root), *below):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            folder = os.open(name, _FOLDER, dir_fd=folder)
            stack.callback(os.close, folder)
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
                raise PermissionError(
                    "it belongs to another user or is writable by others: choose another folder"
                )
        assert folder is not None, "at least the root is opened"
        yield folder


def _created(name: str, folder: int) -> IO[bytes]:
    """Create or truncate a file in a folder, without following links."""
    return open(name, "wb", opener=lambda path, _: os.open(path, _FILE, 0o600, dir_fd=folder))
