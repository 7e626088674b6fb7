"""Resources of a running tritonserver, read from the kernel: processes, files, shared memory, sockets."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.server import runtime_directory
from inflight.server.launch import TritonServer
from tests.commands import group_members


@dataclass(frozen=True)
class Footprint:
    """Footprint of one server at one moment.

    Attributes:
        stubs: Number of processes besides the server's own.
        files: Number of its open file descriptors.
        shared_memory: Bytes of each file in /dev/shm, smallest first.
        endpoints: Engines' sockets.
    """

    stubs: int
    files: int
    shared_memory: tuple[int, ...]
    endpoints: int

    @classmethod
    def of(cls, server: TritonServer) -> Footprint:
        folder, process = server.repository.path.parent, Path("/proc", str(server.pid))
        return cls(
            stubs=sum(1 for pid in group_members(server.pid) if pid != server.pid),
            files=len(os.listdir(process / "fd")),
            shared_memory=tuple(sorted(_sizes(folder))),
            endpoints=len(list(folder.glob("*.sock"))),
        )

    def fits(self, earlier: Footprint) -> bool:
        """Return whether nothing was added since `earlier`; a client may have disconnected since."""
        return replace(self, files=earlier.files) == earlier and self.files <= earlier.files


def folder_of(server: TritonServer) -> Path:
    """Return the server's private folder."""
    return server.repository.path.parent


def left_of(folder: Path) -> list[object]:
    """List the leftovers of a server: processes, shared memory, its private folder."""
    shared_memory = runtime_directory.shared_memory_files(folder)
    return [*runtime_directory.find_processes(folder), *shared_memory, *folder.parent.glob(folder.name)]


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in runtime_directory.shared_memory_files(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sizes
