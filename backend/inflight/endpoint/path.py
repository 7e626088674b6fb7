"""Where the engine endpoint's socket is, and how a server takes the place. Pure but for the file system."""

from __future__ import annotations

import os
import socket
import tempfile

from inflight.errors import ConfigError

_LONGEST = 107  # sun_path holds 108 bytes with its final zero


def endpoint_path(server_pid: int, model_name: str) -> str:
    """The socket of the engine in `model_name` of the tritonserver with this process id.

    In the user's runtime folder if there is one, else the temporary folder; the user id is part of the name,
    so that two users' servers with equal process ids (in two containers, say) do not meet.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = os.path.join(folder, f"inflight-{os.getuid()}-{server_pid}-{model_name}.sock")
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(
            f"engine_endpoint: {path} is longer than the {_LONGEST} bytes that a socket's path may have"
        )
    return path


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, for this user only; a dead server's file is replaced.

    Raises ConfigError if a live server listens there, or the place cannot be used.
    """
    if os.path.exists(path):
        _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # the file has mode 0600 from its first moment
    try:
        listening.bind(path)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"engine_endpoint: cannot listen at {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listening


def _remove_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise ConfigError(f"engine_endpoint: another server listens at {path}")
