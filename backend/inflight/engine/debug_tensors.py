"""Debug tensors: what the forward pass of each iteration was given, and its logits, for people who look into it.

They go to files, or are kept for the last iterations. Each rank writes down its own. Knows no device. The loop
thread writes; any thread may read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.config import DEBUG_INPUTS, DEBUG_OUTPUTS, EngineConfig
from inflight.engine.packing import PackedBatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DebugTensorsPerIteration:
    """TensorRT-LLM's class of the same name.

    Attributes:
        iter: Number of the iteration.
        debug_tensors: By name: `input_ids` and `positions` [rows] int32 and `sequence_length` [sequences] int32,
            how many tokens of each sequence are computed with this iteration, in the order of the packed rows; and
            at the last stage `logits` [rows that choose tokens, vocab_size] float32, in that order too, as the
            model has made them.
    """

    iter: int
    debug_tensors: Mapping[str, NDArray[Any]]


class DebugTensors:
    """Writes tensors down, iteration by iteration.

    Args:
        names: Which.
        max_iterations: For how many iterations they are kept; 0: they go to files.
        folder: Where the files go, `iteration_<number>/<tensor>.npy`.
    """

    def __init__(self, names: frozenset[str], max_iterations: int, folder: Path) -> None:
        self._names = names
        self._folder = None if max_iterations else folder
        self._lock = threading.Lock()
        self._kept: deque[DebugTensorsPerIteration] = deque(maxlen=max_iterations)

    @classmethod
    def from_config(cls, config: EngineConfig, pp_rank: int, tp_rank: int) -> DebugTensors | None:
        """What the parameters ask for; None for nothing. Ranks have folders of their own, counted from 1."""
        names = {
            *config.debug_tensor_names,
            *(DEBUG_INPUTS if config.debug_input_tensors else ()),
            *(DEBUG_OUTPUTS if config.debug_output_tensors else ()),
        }
        if not names:
            return None
        folder = Path(config.debug_tensors_dir, f"PP_{pp_rank + 1}", f"TP_{tp_rank + 1}")
        most = config.debug_tensors_max_iterations
        where = f"are kept for the last {most} iterations" if most else f"of every iteration go to {folder}"
        _log.warning("debug tensors (%s) %s: this is slow", ", ".join(sorted(names)), where)
        return cls(frozenset(names), most, folder)

    def write(self, iteration: int, packed: PackedBatch, logits: Tensor | None) -> None:
        """Write an iteration down; waits for the device.

        Args:
            iteration: Its number.
            packed: Its rows.
            logits: In the order of `packed.sampled_rows`; None before the last stage.
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
        found = {name: make().cpu().numpy().copy() for name, make in tensors.items() if name in self._names}
        if self._folder is not None:
            self._save(self._folder / f"iteration_{iteration}", found)
            return
        with self._lock:
            self._kept.append(DebugTensorsPerIteration(iteration, found))

    def latest(self) -> list[DebugTensorsPerIteration]:
        """The last iterations since the last call, oldest first; always empty where they go to files."""
        with self._lock:
            kept = list(self._kept)
            self._kept.clear()
        return kept

    def _save(self, folder: Path, found: Mapping[str, NDArray[Any]]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, values in found.items():
                np.save(folder / f"{name}.npy", values)
        except OSError as error:  # requests must not end for a full disk
            _log.error("debug tensors are not written any more: %s", error)
            self._names = frozenset()
