"""The dtypes and shapes of the tensors in a file of `torch.save`, without torch and without running code in it.

Such a file is an archive (zip) with a pickle in it. A pickle names functions to call; here only those that stand
for a tensor are known, and they make its dtype and shape. Standard library only.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from inflight.safetensors_header import TensorHeader

PICKLED = "pytorch_model.bin"
"""The name of a model's file of this kind."""
_LARGEST_PICKLE = 64 << 20
"""Maximum size of the pickle in bytes; the tensors' values are in other files of the archive."""
_DTYPES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""The dtypes by the names of torch's storages, with the names of the safetensors format."""


def pickled_file(folder: Path) -> Path | None:
    """Return pytorch_model.bin if the weights in `folder` are read from it; None: there are others, or none."""
    path = folder / PICKLED
    return path if path.is_file() and not any(folder.glob("*.safetensors")) else None


def pickled_tensors(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a file by name; empty if it is not such a file, or holds something else than tensors.

    Raises OSError if the file cannot be read.
    """
    try:
        with ZipFile(path) as archive:
            (described,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if described.file_size > _LARGEST_PICKLE:
                return {}
            with archive.open(described) as file:
                found: Any = _HeaderUnpickler(file).load()
        tensors = dict(found)
    except OSError:
        raise
    except Exception:  # of any class, for damaged files
        return {}
    named = all(isinstance(each, str) and isinstance(tensors[each], TensorHeader) for each in tensors)
    return tensors if named else {}


class _HeaderUnpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """Loads tensors as their headers, and refuses everything else that is not a plain value.

    It is in Python, because the one in C reserves as much memory as a damaged pickle asks for.
    """

    def persistent_load(self, pid: Any) -> str:
        """Return the dtype of a storage."""
        _, dtype, *_ = pid
        return str(dtype)

    def find_class(self, module: str, name: str) -> Callable[..., Any] | str:
        """Return the function that makes a tensor's header, or the dtype of a class of storages."""
        known = _FUNCTIONS.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not a part of a tensor")


def _tensor(dtype: object, offset: int, shape: tuple[int, ...], *_: object) -> TensorHeader:
    """Return the header of a tensor, in place of `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(dtype, str) or dtype not in _DTYPES.values():
        raise pickle.UnpicklingError(f"{dtype!r} is not a dtype")
    return TensorHeader(dtype, tuple(map(int, shape)))


def _parameter(tensor: TensorHeader, *_: object) -> TensorHeader:
    """Return the header of a parameter, in place of `torch._utils._rebuild_parameter`."""
    return tensor


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): OrderedDict,
}
