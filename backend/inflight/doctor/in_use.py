"""The folders, files and sockets of a server's options that another server uses.

Makes no files, and keeps no locks. What needs numpy or msgspec is imported in functions, because the launcher,
which calls this, runs as long as the server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inflight.config import Parameters
from inflight.file_names import native
from inflight.server.launch import ServerOptions
from inflight.server.repository import ENGINE_ENDPOINT

_ENDS_S = 1.0  # time in which a server that was killed ends


def in_use(options: ServerOptions) -> str | None:
    """Return which folder, file or socket of the options another server uses, with what to do about it."""
    if options.write_repository is not None:
        return None  # they may be those of another machine
    for reason, is_in_use in _exclusive(options):
        with contextlib.suppress(OSError):  # loading the model reports it
            if _stays(is_in_use):
                return reason
    return None


def blocks_in_use(folder: Path, parameters: Parameters) -> str | None:
    """Return that another server with the same model and settings saves its KV blocks in the folder."""
    model = parameters.engine.gpt_model_path or parameters.engine.engine_dir
    if model is None or not any(folder.glob("*/lock")):
        return None
    from inflight.block_store.files import is_in_use
    from inflight.engine_parts import label_of_blocks

    with contextlib.suppress(OSError):  # loading the model reports it
        label = label_of_blocks(parameters, native(model))
        if _stays(lambda: is_in_use(folder, label)):
            return "another server uses the blocks of this model there; give each server a folder of its own"
    return None


def _exclusive(options: ServerOptions) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield for each path that only one server may use: the reason if another one does, and whether one does."""
    if options.ports.openai is not None:
        if (folder := options.openai.batch_dir) is not None and folder.is_dir():
            from inflight.openai.batches.folder import is_in_use as is_folder_in_use

            yield (
                f"--batch-dir {folder}: another server uses this folder; give each server a folder of its own",
                lambda: is_folder_in_use(folder),
            )
        if (file := options.openai.response_store) is not None and file.is_file():
            from inflight.openai.responses.file import is_in_use as is_file_in_use

            yield (
                f"--response-store {file}: another server uses this file; give each server a file of its own",
                lambda: is_file_in_use(file),
            )
    socket = options.wanted.settings.get(ENGINE_ENDPOINT)
    if socket is not None and Path(socket).is_socket():
        from inflight.endpoint.path import is_in_use as is_socket_in_use

        yield (
            f"--set {ENGINE_ENDPOINT}={socket}: another server listens there; give each server a socket of its "
            "own",
            lambda: is_socket_in_use(socket),
        )


def _stays(is_in_use: Callable[[], bool]) -> bool:
    """Return whether something stays in use for a moment: a server that was killed may just be ending."""
    deadline = time.monotonic() + _ENDS_S
    while is_in_use():
        if time.monotonic() >= deadline:
            return True
        time.sleep(_ENDS_S / 10)
    return False
