"""A private folder for one running server, and what else on the machine carries its name.

Owns the folder and what lies in /dev/shm under names that start with the folder's name. Does not know what is put
into the folder, nor when the server has ended.
"""

import shutil
import tempfile
from pathlib import Path

_PREFIX = "inflight-server-"
_SHARED_MEMORY = Path("/dev/shm")


def make() -> Path:
    """A new, empty folder that only this user can read."""
    # The Python backend starts its stub through a shell without quoting, so the path must have no spaces, and the
    # stub's Python reads its modules from it, so it should have no letters outside ASCII (see `file_names`).
    parent = tempfile.gettempdir()
    plain = parent.isascii() and not any(character.isspace() for character in parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent if plain else "/tmp"))


def shared_memory_prefix(folder: Path) -> str:
    """What the names of the server's shared-memory files start with."""
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
