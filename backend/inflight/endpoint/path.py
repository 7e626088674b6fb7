"""The path of the engine endpoint's socket, and functions to listen and connect at this path.

A stale socket file of a dead server is replaced; other files, and sockets of live servers, are not touched.
Any thread may call these functions.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import tempfile
from hashlib import blake2b

from inflight.endpoint.frames import BadFrame, Hello, decode_from_engine, read_frame
from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.processes import PARENT, stat_fields

LONGEST_SOCKET_PATH = 107
"""Maximum length of a socket's path in bytes: Linux keeps it in 108 bytes, with a final zero."""
_LONGEST_NAME = 40
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user and group id


def endpoint_path(server_pid: int, model_name: str, runtime_folder: str | None = None) -> str:
    """Return the socket path of the engine in model `model_name` of the tritonserver with this process id.

    The socket is in the user's runtime folder if there is one, otherwise in the temporary folder. The user
    id is part of the name, so that servers of two users with equal process ids (for example in two
    containers) do not collide. A folder whose path is too long for a socket is skipped.

    Args:
        server_pid: tritonserver's process id.
        model_name: The model that holds the engine.
        runtime_folder: The tritonserver's runtime folder; None: the folder of this process.
    """
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "") if runtime_folder is None else runtime_folder
    name = f"inflight-{os.geteuid()}-{server_pid}-{_file_name(model_name)}.sock"
    folders = (runtime_folder, tempfile.gettempdir(), "/tmp")
    paths = [os.path.join(folder, name) for folder in folders if os.access(folder, os.W_OK)]
    return next((path for path in paths if socket_path_fits(path)), os.path.join("/tmp", name))


def socket_path_fits(path: str) -> bool:
    """Return whether a Unix socket can have this path."""
    return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH


def listen(path: str, option: str = "engine_endpoint") -> socket.socket:
    """Listen at `path`, for this user only. Replaces the socket file of a dead server.

    Raises ConfigError if a live server listens at the path, or the path cannot be used. `option` is the name
    of the path's option, for the error.
    """
    if not socket_path_fits(path):
        raise ConfigError(
            f"{option}: {path} is longer than the {LONGEST_SOCKET_PATH} bytes of a socket's path"
        )
    listening = socket.socket(socket.AF_UNIX)
    try:
        remove_stale(path, option)
        listening.bind(path)
        os.chmod(path, 0o600)  # before it listens, so that no client can have connected
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"{option}: cannot listen at {path}: {error.strerror}") from error
    except ConfigError:
        listening.close()
        raise
    return listening


def remove(path: str) -> None:
    """Delete the socket's file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def connect(connection: socket.socket, path: str) -> Hello:
    """Connect a Unix socket to the engine at `path`, and return its Hello.

    Raises OSError if the engine cannot be reached. Raises BadFrame if its first message is not a Hello, or
    its process belongs to a user other than this process's user and root.
    """
    reach(connection, path)
    return read_hello(connection)


def reach(connection: socket.socket, path: str) -> None:
    """Connect like `connect`, but do not wait for the Hello, which a busy engine may send late."""
    connection.connect(native(path))
    check_peer(connection)


def check_peer(connection: socket.socket) -> None:
    """Raise BadFrame if the peer's process belongs to a user other than this process's user and root."""
    _pid, uid, _gid = _peer(connection)
    if uid not in (0, os.geteuid()):
        raise BadFrame("it belongs to another user")


def read_hello(connection: socket.socket) -> Hello:
    """Read the engine's first frame; raises BadFrame if it is not a Hello."""
    body = read_frame(connection)
    frame = decode_from_engine(body) if body is not None else None
    if not isinstance(frame, Hello):
        raise BadFrame("the engine's first message is not a Hello")
    return frame


def peer_has_this_parent(connected: socket.socket) -> bool:
    """Return whether the peer is another process with the same parent process as this one."""
    pid, _uid, _gid = _peer(connected)
    fields = stat_fields(pid)  # None if it has ended or is not visible
    return pid != os.getpid() and fields is not None and int(fields[PARENT]) == os.getppid()


def _peer(connected: socket.socket) -> tuple[int, int, int]:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)


def remove_stale(path: str, option: str = "engine_endpoint") -> None:
    """Delete a dead server's socket file if it exists.

    Raises ConfigError if a live server listens at the path, or the file is not a socket. `option` is the name of
    the path's option, for the error.
    """
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"{option}: {path} exists and is not a socket")
    if is_in_use(path):
        raise ConfigError(f"{option}: another server listens at {path}")
    remove(path)  # its server is dead


def is_in_use(path: str) -> bool:
    """Return whether a process listens at a Unix socket, which must exist."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
    return True


def _file_name(model_name: str) -> str:
    """Return `model_name` if it can be part of a file name; otherwise a readable part of it with a hash."""
    if re.fullmatch(r"[\w.-]+", model_name, re.ASCII) and len(model_name) <= _LONGEST_NAME:
        return model_name
    digest = blake2b(model_name.encode(), digest_size=8).hexdigest()
    readable = re.sub(r"[^\w.-]+", "_", model_name, flags=re.ASCII)
    return f"{readable[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
