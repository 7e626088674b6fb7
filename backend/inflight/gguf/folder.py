"""Make a checkpoint folder for a GGUF file: small files converted from its header, and a link to the file.

The folder is in the user's cache. Its name contains a digest of the file and of this package, so that it is
made only once. It may be deleted while no server uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from inflight.errors import ConfigError
from inflight.gguf.config import make_config
from inflight.gguf.header import read_header
from inflight.gguf.tokenizer import make_tokenizer
from inflight.user_cache import cache_folder

GGUF_FILE = "model.gguf"
"""The name of the link to the file."""


def is_gguf(folder: Path) -> bool:
    """Return whether a checkpoint folder has its weights in a GGUF file."""
    return os.path.lexists(folder / GGUF_FILE)


def checkpoint_of(file: Path) -> Path:
    """Return the checkpoint folder of a GGUF file, named like the file; make it if necessary.

    Raises:
        ConfigError: The file cannot be read, or its model is not supported. The message has the reason.
    """
    file = file.resolve()
    parent = cache_folder()
    if parent is None:
        raise ConfigError(
            f"{file}: no folder to write its config.json to: neither XDG_CACHE_HOME nor ~/.cache is writable by "
            "this user alone"
        )
    folder = parent / "gguf" / _digest(file) / file.stem
    if not folder.exists():
        _make(file, folder)
    return folder


def _make(file: Path, folder: Path) -> None:
    header, keys = read_header(file)
    files = {"config.json": make_config(header, keys)}
    tokenizer = make_tokenizer(header.architecture, keys)
    if tokenizer is not None:
        files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer
    try:
        folder.parent.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent.parent))
        try:
            inside = made / folder.name
            inside.mkdir()
            for name, content in files.items():
                text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
                (inside / name).write_text(text, encoding="utf-8")
            (inside / GGUF_FILE).symlink_to(file)
            os.rename(made, folder.parent)
        except BaseException:  # whatever the error, no unfinished folder stays
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        if not folder.exists():  # if it exists, another process has made it meanwhile
            raise ConfigError(f"{file}: its folder {folder} cannot be written: {error}") from error


def _digest(file: Path) -> str:
    """Return a digest of the file's path, size and modification time, and of this package's sources."""
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"{file}: the GGUF file cannot be read: {error}") from error
    digest = blake2b(
        f"{file}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"), digest_size=8
    )
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
