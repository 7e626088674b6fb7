"""The identity of a KV cache's content: which model, code and settings computed it.

Blocks of one identity are interchangeable between processes; blocks of another one are not even looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from inflight.pickled_header import pickled_file
from inflight.safetensors_header import tensor_ranges

_WHOLE_BYTES = 8 << 20
"""Files up to this size are read whole."""
_STRIDE = 4 << 20
_SAMPLE_BYTES = 4096
_SUFFIXES = frozenset({".json", ".safetensors", ".gguf"})


def cache_identity(folders: Mapping[str, Path], settings: Mapping[str, object]) -> str:
    """Return the identity of a model's KV blocks, 32 hexadecimal digits.

    Of large files 4 KiB in every 4 MiB are read, and the first 4 KiB of every tensor of a safetensors file: a
    tensor that is replaced is noticed, although only about a thousandth of a large checkpoint is read.

    Args:
        folders: Folders of the model by the prefix of their files' names; see `receipts.ModelFiles`.
        settings: Other facts on which keys and values depend: versions, code, dtypes, layout.

    Raises:
        OSError: A file cannot be read.
    """
    found = blake2b(digest_size=16)
    for name, value in sorted(settings.items()):
        _add(found, f"{name}={value}".encode())
    for prefix, folder in sorted(folders.items()):
        pickled = pickled_file(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (path.suffix in _SUFFIXES or path == pickled) and path.is_file():
                _add(found, (prefix + path.name).encode())
                _add(found, _sample(path))
    return found.hexdigest()


def _add(found: blake2b, part: bytes) -> None:
    # Each part is preceded by its length, so that the concatenation is unambiguous.
    found.update(len(part).to_bytes(8, "big") + part)


def _sample(path: Path) -> bytes:
    """Return a digest of a file's size and of samples of its content."""
    found = blake2b(digest_size=16)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        found.update(size.to_bytes(8, "big"))
        if size <= _WHOLE_BYTES:
            found.update(os.pread(file, size, 0))
        else:
            tensors = [begin for begin, _ in tensor_ranges(file) or ()]
            for start in (*range(0, size, _STRIDE), *tensors):
                found.update(os.pread(file, _SAMPLE_BYTES, start))
    finally:
        os.close(file)
    return found.digest()
