"""The *.safetensors files of a checkpoint folder: names, shapes and data of the tensors.

A folder of a GGUF file has no *.safetensors files; `gguf_tensors.py` adds its tensors. Independent of the model.
Files are memory-mapped while the checkpoint is open, so only requested tensors are read.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.checkpoint_config import ConfigFile, instead_of_gguf
from inflight.errors import ConfigError
from inflight.gguf.folder import is_gguf
from inflight.models.levels import Levels, MatrixKind
from inflight.pickled_header import pickled_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's file, shape and dtype.

    Attributes:
        file: Name of the file inside the folder.
        shape: Dimensions.
        dtype: float32, bfloat16 or float16; for any other dtype, its name in the file format.
        level_bytes: For a quantized matrix, the size of its levels and scales if they are kept, in bytes.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    level_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LevelsOfFile:
    """Access to a quantized matrix's levels in a file.

    Attributes:
        kind: The matrix's format, derived from the shapes of its tensors.
        read: Returns the levels, mapped or copied.
        release: Releases the levels that `read` returned.
    """

    kind: MatrixKind
    read: Callable[[], Levels]
    release: Callable[[], None]


class Checkpoint:
    """The tensors of a checkpoint by name, in one or several files. A context manager that unmaps the files.

    Args:
        folder: The checkpoint's folder.
        may_be_pickled: Whether the tensors may be in pytorch_model.bin if there is no safetensors file. The caller
            has checked the file with `pickled_tensors`. No code in the file is run.

    Attributes:
        tensors: File, shape and dtype of each tensor.
        levels: Access to the quantized integers (levels) and scales of the quantized tensors.
        left_out: Number of tensors that `leave_out` has removed, for each prefix.
    """

    def __init__(self, folder: Path, may_be_pickled: bool = False) -> None:
        """Map the files of `folder`; raise ConfigError if any is missing or damaged."""
        self.folder = folder
        self._closing = ExitStack()
        self._files: dict[str, Any] = {}  # open files, whose methods safetensors declares without types
        self._stored_as: dict[str, str] = {}
        self._added: dict[str, Callable[[], Tensor]] = {}
        self.levels: dict[str, LevelsOfFile] = {}
        self.left_out: Counter[str] = Counter()
        try:
            if may_be_pickled and (pickled := pickled_file(folder)) is not None:
                self._files[pickled.name] = _PickledFile(pickled)
                self.tensors = self._files[pickled.name].described()
                return
            # In transformers' order: if a tensor is in two files, the last file is used.
            for name, expected in sorted(_file_names(folder).items()):
                self._open(name, expected)
            self.tensors = dict(self._describe())
        except BaseException:  # of any kind: the files must be closed
            self._closing.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read(self, name: str) -> Tensor:
        """Return tensor `name` on the CPU, in the file's dtype."""
        if name in self._added:
            return self._added[name]()
        return self.read_stored(name, self.tensors[name])

    def read_stored(self, name: str, info: TensorInfo) -> Tensor:
        """Return a tensor of the files, even if it was removed from `tensors`."""
        return self._files[info.file].get_tensor(self._stored_as.get(name, name))

    def add(
        self, name: str, info: TensorInfo, make: Callable[[], Tensor], levels: LevelsOfFile | None = None
    ) -> None:
        """Add a tensor that `make` computes from other tensors at each read.

        `levels` gives access to its quantized integers; None if it is not quantized.
        """
        self.tensors[name], self._added[name] = info, make
        if levels is not None:
            self.levels[name] = levels

    def rename(self, name: str, new_name: str) -> None:
        """Rename tensor `name` to `new_name`."""
        self.tensors[new_name] = self.tensors.pop(name)
        self._stored_as[new_name] = self._stored_as.pop(name, name)

    def join(self, names: list[str], new_name: str) -> None:
        """Replace stored tensors by one that has the rows of all of them, in this order.

        Tensors whose dtypes, or shapes other than rows, differ are left as they are.
        """
        infos = [self.tensors[name] for name in names]
        if len({(info.dtype, info.shape[1:]) for info in infos}) > 1:
            return
        stored = [(name, self.tensors.pop(name)) for name in names]
        rows = sum(info.shape[0] for info in infos)
        joined = replace(infos[0], shape=(rows, *infos[0].shape[1:]))
        self.add(new_name, joined, lambda: torch.cat([self.read_stored(*each) for each in stored]))

    def leave_out(self, prefixes: tuple[str, ...]) -> None:
        """Remove the tensors whose names start with one of `prefixes` from `tensors`, and count them in
        `left_out`."""
        for name in list(self.tensors):
            if prefix := next((each for each in prefixes if name.startswith(each)), None):
                del self.tensors[name]
                self.left_out[prefix] += 1

    def release_pages(self, tensor: Tensor) -> None:
        """Release the mapped pages of a tensor that `read` returned, as they count as this process's memory."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        end = (tensor.data_ptr() + reach * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            _madvise(start, end - start, mmap.MADV_DONTNEED)

    def _open(self, name: str, expected: set[str]) -> None:
        path = self.folder / name
        try:
            self._files[name] = self._closing.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist, but {_INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
        except (
            RuntimeError
        ) as error:  # torch maps the file, which may exceed the machine's limit for mappings
            raise ConfigError(f"{path} cannot be mapped into memory: {error}") from error
        absent = expected.difference(self._files[name].keys())
        if absent:
            raise ConfigError(f"{path} has no tensor {min(absent)!r}, but {_INDEX} lists it")

    def _describe(self) -> list[tuple[str, TensorInfo]]:
        infos: list[tuple[str, TensorInfo]] = []
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 - a file handle, not a dict
                view = handle.get_slice(name)
                stored: str = view.get_dtype()
                dtype = _FLOAT_DTYPES.get(stored, stored)
                infos.append((name, TensorInfo(file, tuple(view.get_shape()), dtype)))
        return infos


class _PickledFile:
    """A mapped file of `torch.save`, with the method of safetensors' open files by which tensors are read."""

    def __init__(self, path: Path) -> None:
        """Map the file; raise ConfigError if it is damaged, or would run code."""
        self._name = path.name
        try:
            self._tensors: dict[str, Tensor] = torch.load(path, "cpu", weights_only=True, mmap=True)
        except Exception as error:  # of any class, for damaged files
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def described(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(self._name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _file_names(folder: Path) -> dict[str, set[str]]:
    """Return the files to open, each with the tensors that an index expects in it.

    As in transformers, a single file takes precedence over an index in the same folder, whose shards may be
    missing.
    """
    if (folder / _SINGLE).exists():
        return {_SINGLE: set()}
    if (folder / _INDEX).exists():
        weight_map = ConfigFile.load(folder / _INDEX).child("weight_map")
        files: dict[str, set[str]] = {}
        for tensor, file in weight_map.values.items():
            if not isinstance(file, str) or (file not in files and Path(file).name != file):
                raise weight_map.error(tensor, "the name of a file in the same folder")
            files.setdefault(file, set()).add(tensor)
        return files
    if is_gguf(folder):
        return {}
    found = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    raise ConfigError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; found {', '.join(found) if found else 'no weight files'}. "
        f"Weights are read from safetensors files only{instead_of_gguf(folder)}"
    )
