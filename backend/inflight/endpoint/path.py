"""Where an engine's socket is, and who may take that place.

Owns the naming rule and the file's life: stale files are removed, live ones respected. Does not know what is said
over the socket. Plain functions, any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from hashlib import blake2b

from inflight.errors import ConfigError

_MAX_PATH_BYTES = 107  # sun_path holds 108 bytes and ends in a zero
_MAX_NAME = 40


def endpoint_path(server_pid: int, model_name: str) -> str:
    """The path that the engine of `model_name` and its front ends agree on without talking.

    It is in $XDG_RUNTIME_DIR, else in the folder for temporary files, and unique per user, server process and model.
    """
    name = f"inflight-{os.geteuid()}-{server_pid}-{_file_name(model_name)}.sock"
    folders = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
    paths = [os.path.join(folder, name) for folder in folders if folder and os.path.isdir(folder)]
    return next((path for path in paths if len(os.fsencode(path)) <= _MAX_PATH_BYTES), paths[-1])


def bind_endpoint(path: str) -> socket.socket:
    """A listening socket at `path`, open to this user alone.

    Raises:
        ConfigError: Somebody listens there already, or the file can't be made.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"the engine endpoint's path is longer than {_MAX_PATH_BYTES} bytes: {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)  # before listen: nobody can have connected yet
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot open the engine endpoint {path}: {error.strerror or error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_endpoint(path: str) -> None:
    """Delete the socket file; no error if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"the engine endpoint {path} is in the way of a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove_endpoint(path)  # its process is dead
            return
    raise ConfigError(
        f"another engine listens at {path}; give every server its own endpoint (parameter engine_endpoint)"
    )


def _file_name(model_name: str) -> str:
    """`model_name` if it can be part of a file name, else something as unique and nearly as readable."""
    if re.fullmatch(r"[\w.-]+", model_name, re.ASCII) and len(model_name) <= _MAX_NAME:
        return model_name
    digest = blake2b(model_name.encode(), digest_size=8).hexdigest()
    readable = re.sub(r"[^\w.-]+", "_", model_name, flags=re.ASCII)
    return f"{readable[: _MAX_NAME - len(digest) - 1]}-{digest}"


def peer_is_this_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this user (or as root)."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # pid, uid, gid
    return int.from_bytes(credentials[4:8], "little") in (0, os.geteuid())
