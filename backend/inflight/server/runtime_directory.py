"""The private folder of one running server, and all else on the machine that belongs to the server by that folder.

That is shared memory under names that start with the folder's name, and processes: tritonserver, its stubs, mpirun
and the ranks on this machine. mpirun gives every rank a process group of its own, and a process that loses its
parent gets another one; so they are known by the folder, which the environment that they inherit names. Notes
in the folder say which process tritonserver is, which models have loaded what they need, and that the server was
ended because it could not serve any more.
Standard library only, as the keeper and the guards run it beside tritonserver. Any thread.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

from inflight.processes import ProcessId

FOLDER_VARIABLE = "XDG_RUNTIME_DIR"
"""The environment variable that names a server's folder to its processes. The engine's socket goes there too."""

PID_FILE = "tritonserver.pid"
"""In the server's folder: tritonserver's process id, on a line."""

UMASK = 0o077
"""Of all processes of a server: what they make is for this user alone, Triton's shared memory too."""

_LOSS_FILE = "lost"  # in the server's folder: a guard has ended the server, whatever its exit status says
_INITIALIZED = "initialized-"  # and a model's name: a process of that model is done with what it loads
_PREFIX = "inflight-server-"
_SHARED_MEMORY = Path("/dev/shm")
_END_S = 10.0  # a process that hangs in a device driver cannot be ended, nor waited for


def make() -> Path:
    """A new, empty folder that only this user can read."""
    # The Python backend starts its stub through a shell without quoting, so the path must have no spaces, and the
    # stub's Python reads its modules from it, so it should have no letters outside ASCII (see `file_names`).
    parent = tempfile.gettempdir()
    plain = parent.isascii() and not any(character.isspace() for character in parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent if plain else "/tmp"))


def shared_memory_prefix(folder: Path) -> str:
    """The prefix of the names of the server's shared-memory files."""
    return folder.name


def shared_memory_files(folder: Path) -> list[Path]:
    """The server's shared-memory files that exist now."""
    return sorted(_SHARED_MEMORY.glob(shared_memory_prefix(folder) + "*"))


def make_shared_memory_folder(folder: Path) -> Path:
    """A folder for further shared memory of the server's, among its shared-memory files."""
    path = _SHARED_MEMORY / f"{shared_memory_prefix(folder)}-ranks"
    path.mkdir(mode=0o700)
    return path


def remove(folder: Path) -> None:
    """Delete the folder and the shared memory; for when the server's processes have ended."""
    for path in shared_memory_files(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def find_processes(folder: Path) -> list[ProcessId]:
    """The server's processes that run now."""
    mark = os.fsencode(f"{FOLDER_VARIABLE}={folder}")
    running = [ProcessId.of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [process for process in running if process is not None and mark in _environment(process.pid)]


def end_processes(folder: Path) -> None:
    """Kill the server's processes, and whatever they start meanwhile; returns when they are gone."""
    while processes := find_processes(folder):
        for process in processes:
            process.signal(signal.SIGKILL)
        if not all(process.wait(_END_S) for process in processes):
            return


def read_pid(folder: Path) -> int | None:
    """tritonserver's process id; None before it has been started."""
    with contextlib.suppress(OSError):
        text = (folder / PID_FILE).read_text()
        return int(text) if text.endswith("\n") else None
    return None


def note_loss() -> None:
    """Say, from a process of the server's, that the server is ended because it cannot serve any more."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
    if read_pid(folder) is not None:  # otherwise nobody has made the folder for the server
        with contextlib.suppress(OSError):
            (folder / _LOSS_FILE).touch()


def was_lost(folder: Path) -> bool:
    """Whether a process of the server's has called `note_loss`."""
    return (folder / _LOSS_FILE).exists()


def note_initialized(model: str) -> None:
    """Say, from a process of the server's, that this process has loaded what its model needs."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
    if read_pid(folder) is not None:
        with contextlib.suppress(OSError):
            (folder / f"{_INITIALIZED}{model}").touch()


def initialized_models(folder: Path) -> set[str]:
    """The models of which a process has called `note_initialized`."""
    return {path.name.removeprefix(_INITIALIZED) for path in folder.glob(f"{_INITIALIZED}*")}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile, or is another user's
        return []
