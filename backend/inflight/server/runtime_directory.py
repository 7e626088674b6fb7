"""The private folder of one running server, and the shared memory and processes that belong to it.

The names of the server's shared memory begin with the folder's name. The server's processes are
tritonserver, its stubs, mpirun and the ranks on this machine. They can be found neither by their process
groups, as mpirun gives every rank a group of its own, nor by their parents, as orphans get another parent.
So they are found by the folder's path in the environment, which they inherit. Files in the folder record
tritonserver's process id, the models that have been loaded, and whether the server was ended because it
could no longer serve. Imports only the standard library, because the keeper and the guards use it beside
tritonserver. Any thread.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

from inflight.processes import ProcessId, all_pids, words_of

FOLDER_VARIABLE = "XDG_RUNTIME_DIR"
"""Environment variable with the path of a server's folder, in which the engine's socket is, too."""

PID_FILE = "tritonserver.pid"
"""File in the server's folder with tritonserver's process id, on a line."""

PICTURES_SOCKET = "pictures.socket"
"""Socket in the server's folder at which the process that encodes pictures listens."""

UMASK = 0o077
"""Umask of a server's processes, with which only this user can read their files and Triton's shared memory."""

_LOSS_FILE = "lost"  # this file exists if a guard has ended the server, whatever the server's exit status is
_INITIALIZED = "initialized-"  # prefix of the file that exists if a model is loaded; the model's name follows
_PREFIX = "inflight-server-"
_SHARED_MEMORY = Path("/dev/shm")
_END_S = 10.0  # seconds to wait; a process that hangs in a device driver cannot be ended


def make() -> Path:
    """Make a new, empty folder that only this user can read."""
    # The path must have no spaces, because the Python backend starts its stub through a shell without
    # quoting. The path should be ASCII, because the stub's Python imports modules from this folder (see
    # `file_names`).
    parent = tempfile.gettempdir()
    plain = parent.isascii() and not any(character.isspace() for character in parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent if plain else "/tmp"))


def shared_memory_prefix(folder: Path) -> str:
    """Return the prefix of the names of the server's shared-memory files."""
    return folder.name


def shared_memory_files(folder: Path) -> list[Path]:
    """Return the server's shared-memory files that exist now."""
    return sorted(_SHARED_MEMORY.glob(shared_memory_prefix(folder) + "*"))


def make_shared_memory_folder(folder: Path) -> Path:
    """Make a folder for further shared memory of the server, among its shared-memory files."""
    path = _SHARED_MEMORY / f"{shared_memory_prefix(folder)}-ranks"
    path.mkdir(mode=0o700)
    return path


def remove(folder: Path) -> None:
    """Delete the folder and the shared memory, after the server's processes have ended."""
    for path in shared_memory_files(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def find_processes(folder: Path) -> list[ProcessId]:
    """Return the server's running processes."""
    mark = os.fsencode(f"{FOLDER_VARIABLE}={folder}")
    running = map(ProcessId.of, all_pids())
    return [
        process for process in running if process is not None and mark in words_of(process.pid, "environ")
    ]


def end_processes(folder: Path) -> None:
    """Kill the server's processes, and processes that they start meanwhile; return when all have ended."""
    while processes := find_processes(folder):
        for process in processes:
            process.signal(signal.SIGKILL)
        if not all(process.wait(_END_S) for process in processes):
            return


def read_pid(folder: Path) -> int | None:
    """Return tritonserver's process id; None before it is started."""
    with contextlib.suppress(OSError):
        text = (folder / PID_FILE).read_text()
        return int(text) if text.endswith("\n") else None
    return None


def note_loss() -> None:
    """Record that the server is ended because it can no longer serve. Called in a process of the server."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
    if read_pid(folder) is not None:  # else the folder does not belong to a server
        with contextlib.suppress(OSError):
            (folder / _LOSS_FILE).touch()


def was_lost(folder: Path) -> bool:
    """Return whether a process of the server has called `note_loss`."""
    return (folder / _LOSS_FILE).exists()


def note_initialized(model: str) -> None:
    """Record that this process has loaded the model. Called in a process of the server."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
    if read_pid(folder) is not None:
        with contextlib.suppress(OSError):
            (folder / f"{_INITIALIZED}{model}").touch()


def initialized_models(folder: Path) -> set[str]:
    """Return the models whose processes have called `note_initialized`."""
    return {path.name.removeprefix(_INITIALIZED) for path in folder.glob(f"{_INITIALIZED}*")}
