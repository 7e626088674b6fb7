"""Make a checkpoint folder for a GGUF file: small files converted from its header, and a link to the file.

If the model is split into several files, there is a link to each of them. The folder is in the user's cache. Its
name contains a digest of the files and of this package, so that it is made only once. It may be deleted while no
server uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from inflight.errors import ConfigError
from inflight.gguf.config import make_config
from inflight.gguf.header import find_parts, model_name, read_header
from inflight.gguf.tokenizer import make_tokenizer
from inflight.user_cache import cache_folder

GGUF_FILE = "model.gguf"
"""The name of the link to the file, or to the first one."""


def is_gguf(folder: Path) -> bool:
    """Return whether a checkpoint folder has its weights in a GGUF file."""
    return os.path.lexists(folder / GGUF_FILE)


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF files that a checkpoint folder has links to, in their order."""
    others = sorted(path for path in folder.glob("*.gguf") if path.name != GGUF_FILE)
    return tuple(path.resolve() for path in (folder / GGUF_FILE, *others))


def checkpoint_of(file: Path) -> Path:
    """Return the checkpoint folder made from a GGUF file of one or more parts; make it if necessary.

    Raises:
        ConfigError: A file cannot be read, or the model is not supported. The message has the reason.
    """
    # The hub's cache has links with the names of parts, to files without names.
    parts = find_parts(Path(os.path.abspath(file)))
    name = model_name(file)
    for number, part in enumerate(parts, 1):
        if not part.is_file():
            place = f"; it is part {number} of {len(parts)} of {name}" if len(parts) > 1 else ""
            raise ConfigError(f"{part}: the GGUF file does not exist{place}")
    files = tuple(part.resolve() for part in parts)
    parent = cache_folder()
    if parent is None:
        raise ConfigError(
            f"{files[0]}: no folder to write its config.json to: neither XDG_CACHE_HOME nor ~/.cache is "
            "writable by this user alone"
        )
    folder = parent / "gguf" / _digest(files) / name
    if not folder.exists():
        _make(files, folder)
    return folder


def _make(files: Sequence[Path], folder: Path) -> None:
    header, keys = read_header(files)
    contents = {"config.json": make_config(header, keys)}
    tokenizer = make_tokenizer(header.architecture, keys)
    if tokenizer is not None:
        contents["tokenizer.json"], contents["tokenizer_config.json"] = tokenizer
    try:
        folder.parent.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent.parent))
        try:
            inside = made / folder.name
            inside.mkdir()
            for name, content in contents.items():
                text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
                (inside / name).write_text(text, encoding="utf-8")
            for number, file in enumerate(files, 1):
                name = GGUF_FILE if number == 1 else f"model-{number:05}-of-{len(files):05}.gguf"
                (inside / name).symlink_to(file)
            os.rename(made, folder.parent)
        except BaseException:  # whatever the error, no unfinished folder stays
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        if not folder.exists():  # if it exists, another process has made it meanwhile
            raise ConfigError(f"{files[0]}: its folder {folder} cannot be written: {error}") from error


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the files' paths, sizes and modification times, and of this package's sources."""
    digest = blake2b(digest_size=8)
    for file in files:
        try:
            found = file.stat()
        except OSError as error:
            raise ConfigError(f"{file}: the GGUF file cannot be read: {error}") from error
        digest.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
