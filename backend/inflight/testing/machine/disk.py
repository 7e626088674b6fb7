"""A simulated disk for saved KV blocks, and the blocks of a fake engine as bytes.

The files are real ones in a private folder. `inflight.block_store.files` reads and writes them by the disk's
functions, which take their time, transfer a part, find no room, and flip bits. A killed process leaves a file as
far as it was written, and gives up its locks.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.testing.fake_engine import FakeEngine

from .scheduler import Machine, Process
from .threads import SimulatedModule

_SLOWEST_S = 3.0
_DIGEST_BYTES = 8


class _OpenFile:
    """A file descriptor of a process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def end_with_process(self) -> None:
        os.close(self._number)


class Disk:
    """A disk, which keeps its files when processes end.

    Args:
        machine: The machine, whose seed also chooses how bad the disk is.

    Attributes:
        path: The folder of its files.
        is_full: Whether writing finds no room.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-disk-")
        self.path = self._folder.name
        self.is_full = False
        rng = machine.rng
        self._flips, self._slow = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.01, 0.2])
        self._partial = rng.choice([0.0, 0.3])
        self._users: dict[int, Process] = {}

    def remove(self) -> None:
        """Remove the disk's folder with all its files."""
        self._folder.cleanup()

    def functions(self) -> SimulatedModule:
        """Return the machine's module `os`, for this disk's files."""
        names = ("open", "close", "write", "readv", "replace", "utime")
        return SimulatedModule(os, {name: getattr(self, f"_{name}") for name in names})

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        number = os.open(path, flags, mode)
        if not self._machine.is_over:
            self._users[number] = process = self._machine.process
            process.resources[-number] = _OpenFile(number)
        return number

    def _close(self, number: int) -> None:
        process = self._users.pop(number, None)
        has_ended = process is not None and process.resources.pop(-number, None) is None
        if not has_ended:  # a process that ends closes its files
            os.close(number)

    def _wait(self) -> None:
        self._machine.pause()
        if self._machine.rng.random() < self._slow:
            self._machine.sleep(self._machine.rng.random() * _SLOWEST_S)

    def _some(self, count: int) -> int:
        """Return how many of `count` bytes a call transfers."""
        rng = self._machine.rng
        return rng.randint(1, count) if rng.random() < self._partial else count

    def _write(self, number: int, content: memoryview) -> int:
        self._wait()
        if self._machine.refuses_memory():
            raise MemoryError
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = bytearray(content[: self._some(len(content))])
        if self._machine.rng.random() < self._flips:
            written[self._machine.rng.randrange(len(written))] ^= 1 << self._machine.rng.randrange(8)
        return os.write(number, written)

    def _readv(self, number: int, buffers: Sequence[memoryview]) -> int:
        self._wait()
        (buffer,) = buffers
        return os.readv(number, [buffer[: self._some(len(buffer))]])

    def _replace(self, old: str, new: str) -> None:
        self._machine.pause()
        os.replace(old, new)
        self._utime(new)

    def _utime(self, path: str, times: tuple[float, float] | None = None) -> None:
        """Set the times of a file, on which the order of removal after a restart depends, by default to the
        machine's."""
        if times is not None:
            os.utime(path, times)
            return
        now_ns = self._machine.now_ns + self._machine.wall_ns
        os.utime(path, ns=(now_ns, now_ns))


class EngineBlocks:
    """The blocks of a fake engine as bytes; implements `inflight.block_store.BlockMemory`.

    Attributes:
        was_used_late: Whether a block was written after the engine was closed.
        num_loaded: How many blocks were written to it.
    """

    state_bytes = 0

    def __init__(self, machine: Machine, engine: FakeEngine, is_on_host: bool) -> None:
        self.is_on_host = is_on_host
        self.block_bytes = engine.limits.tokens_per_block * _DIGEST_BYTES
        self.was_used_late = False
        self.num_loaded = 0
        self._machine = machine
        self._engine = engine

    def read(self, index: int, is_state: bool) -> NDArray[np.uint8]:
        self._refuse_memory()
        return np.array(self._engine._cache[index], np.int64).view(np.uint8)

    def write(self, index: int, is_state: bool, content: NDArray[np.uint8]) -> None:
        self._machine.pause()
        self._refuse_memory()
        if not self._engine._cache:
            self.was_used_late = True
            return
        self.num_loaded += 1
        self._engine._cache[index] = content.view(np.int64).tolist()

    def _refuse_memory(self) -> None:
        if self._machine.refuses_memory():
            raise MemoryError
