"""The processes of a server with several ranks, by role; only their ids are used to end them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from inflight.server import runtime_directory
from inflight.server.launch import TritonServer

_STUB, _WORKER, _MPIRUN = "triton_python_backend_stub", "inflight.worker", "prterun"
_GUIDES = "inflight.guided.child"


@dataclass(frozen=True)
class Processes:
    """Process ids by name: of each rank, "mpirun", "stub" (of the engine's model), or "guides"."""

    by_name: dict[str, int]
    all: frozenset[int]

    @classmethod
    def of(cls, server: TritonServer) -> Processes:
        pids = [process.pid for process in runtime_directory.find_processes(server.repository.path.parent)]
        named = {name: pid for pid in pids if (name := _name(pid))}
        return cls(named, frozenset(pids))

    @property
    def always_there(self) -> frozenset[int]:
        """Return all except the process that compiles guides, which starts with the first guide."""
        return self.all - {self.by_name.get("guides")}

    @property
    def outputs(self) -> dict[str, str]:
        """Return the file or pipe that is the stderr of each process, by name."""
        return {name: os.readlink(f"/proc/{pid}/fd/2") for name, pid in self.by_name.items()}

    def signal(self, name: str, number: int) -> None:
        os.kill(self.by_name[name], number)

    def have_ended(self) -> bool:
        return not any(_runs(pid) for pid in self.all)

    def wake(self) -> None:
        """Continue stopped processes that survived, so that they can end."""
        for pid in self.all:
            if _runs(pid):
                os.kill(pid, signal.SIGCONT)


def shared_memory(server: TritonServer) -> set[str]:
    """Return all shared memory of the server and its ranks, except the ranks' folder."""
    name = server.repository.path.parent.name
    found = [path for top in Path("/dev/shm").glob(f"{name}*") for path in (top, *top.rglob("*"))]
    return {str(path) for path in found if not path.name.endswith("-ranks")}


def _name(pid: int) -> str:
    arguments = _read(pid, "cmdline").split("\0")
    if _WORKER in arguments and Path(arguments[0]).name.startswith("python"):
        environment = dict(entry.partition("=")[::2] for entry in _read(pid, "environ").split("\0"))
        return f"rank {environment.get('OMPI_COMM_WORLD_RANK')}"
    if _GUIDES in arguments:
        return "guides"
    if _STUB in arguments[0]:
        return "stub" if "/tensorrt_llm/1/" in arguments[1] else ""
    return "mpirun" if Path(arguments[0]).name == _MPIRUN else ""


def _runs(pid: int) -> bool:
    return _read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
