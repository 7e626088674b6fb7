"""Packed weights in a file of the user's cache, which the first load writes and later loads map.

The first load packs straight into the mapped file, and so allocates only the embedding and one matrix. Mapped
pages belong to the page cache: servers on one machine share them, and under memory pressure the kernel drops
them and reads them again. A file is valid for one state of the checkpoint's files, of this package's sources
and of torch, and for one rank's part, dtype and target. After a change of any of these, a load replaces the
file or writes another.

The file has the tensors, a pickle of the objects that refer to them, and a trailer with sizes and digests. The
pickle has a tensor's place in the file instead of the tensor. Structs contain addresses of the process that
wrote them, which are replaced when the file is mapped. Like the compiled code in the same folder, the file is
trusted: only its user can write it. Loading thread; if several processes load the same weights, one writes and
the others wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import io
import logging
import math
import mmap
import os
import pickle
import struct
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import torch
from torch import Tensor

from inflight.checkpoint_config import checkpoint_name
from inflight.engine.host_memory import Arena
from inflight.engine.memory import available_cpu_memory
from inflight.models.survey import file_states
from inflight.sampling.transfer import as_array
from inflight.user_cache import PACKED_FOLDER, PACKED_SUFFIX, cache_folder, mark_used, remove_unused

_PACKAGE = Path(__file__).parents[2]
_UNFINISHED, _LOCK = ".part", ".lock"
_DIGEST_BYTES, _NAME_BYTES = 16, 8
_ALIGNMENT = 64  # bytes: a cache line
_TRAILER = struct.Struct(f"<QQ{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
"""The trailer: begin and size of the pickle in bytes, the identity of the weights, and the digest of the
pickle."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mapped(Generic[T]):
    """Packed weights, and how many of their bytes are mapped from a file: 0 if none are."""

    content: T
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The file of one rank's packed weights.

    Attributes:
        path: The file, which need not exist.
        identity: A digest of everything that determines the file's content.
    """

    path: Path
    identity: bytes

    @classmethod
    def of(cls, checkpoint: Path, *layout: object) -> PackedFile | None:
        """Return the file for a checkpoint folder; None if the user has no cache folder.

        `layout`: everything else that decides what is packed and how, with a distinct `repr` for each value.
        """
        cache = cache_folder()
        if cache is None:
            return None
        place = _digest(_encoded((str(checkpoint.resolve()), layout)), size=_NAME_BYTES)
        identity = _digest(place, _encoded(file_states(checkpoint)), _sources())
        name = checkpoint_name(checkpoint).replace("/", "--")
        return cls(cache / PACKED_FOLDER / f"{name}-{place.hex()}{PACKED_SUFFIX}", identity)

    def load(self, pack: Callable[[Arena], T]) -> Mapped[T]:
        """Map the weights; if the file is missing or has another identity, pack the weights into it first.

        `pack` allocates packed matrices in the arena that it gets. If the file cannot be written, `pack` is called
        again with ordinary memory, and the reason is logged as a warning.
        """
        if (found := self._map()) is not None:
            return found
        begun = time.monotonic()
        try:
            with self._one_at_a_time():
                if (found := self._map()) is None:
                    self._write(pack)
                    found = self._map()
            _log.info("the packed weights were written in %.1f s", time.monotonic() - begun)
        except OSError as error:
            _log.warning("the packed weights are in memory, as %s cannot be written: %s", self.path, error)
        return found or Mapped(pack(Arena()))

    def _map(self) -> Mapped[Any] | None:
        """Map the file read-only; return None if it is missing, incomplete or has another identity."""
        try:
            with open(self.path, "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):  # missing, or empty
            return None
        end = len(memory) - _TRAILER.size
        if end < 0:
            return None
        begin, size, identity, digest = _TRAILER.unpack_from(memory, end)
        pickled = memory[begin : begin + size]
        if identity != self.identity or begin + size != end or digest != _digest(pickled):
            return None
        mark_used(self.path)
        _read_ahead(self.path, len(memory))
        _log.info("%.2f GB of packed weights are mapped from %s", len(memory) / 1e9, self.path)
        return Mapped(_Unpickler(pickled, memory).load(), len(memory))

    def _write(self, pack: Callable[[Arena], Any]) -> None:
        """Pack into a temporary file, and rename it when all of it is on disk."""
        part = self.path.with_suffix(_UNFINISHED)
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(handle, "w+b") as file:
                writer = _PackedFileWriter(file)
                writer.finish(pack(Arena(writer.map_region)), self.identity)
                os.fsync(handle)
            os.replace(part, self.path)
        except BaseException:  # of any kind: remove the unfinished file
            part.unlink(missing_ok=True)
            raise
        for suffix in (PACKED_SUFFIX, _UNFINISHED):
            remove_unused(self.path.parent, f"*{suffix}", but=self.path)

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        """Lock the file against other processes that write it, after waiting for them.

        The kernel releases the lock of a process that dies.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(self.path.with_suffix(_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another process writes %s: waiting for it", self.path)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


@dataclass(slots=True)
class _PackedFileWriter:
    """Fills a new file: first the memory that matrices are packed into, then the rest.

    Attributes:
        file: The file.
        end: Size of the file so far, in bytes.
        places: Address, size and offset in the file of each mapped region and each written tensor.
        regions: The mapped regions, kept until the file is finished so that no other tensor gets their addresses.
    """

    file: BinaryIO
    end: int = 0
    places: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    regions: list[Tensor] = field(default_factory=list[Tensor])

    def map_region(self, size: int) -> Tensor:
        """Extend the file by `size` bytes and return them, mapped; raise OSError if the disk is full."""
        begin, size = _aligned(self.end, mmap.PAGESIZE), _aligned(size, mmap.PAGESIZE)
        # Otherwise a full disk would kill the process later.
        os.posix_fallocate(self.file.fileno(), begin, size)
        region = torch.frombuffer(mmap.mmap(self.file.fileno(), size, offset=begin), dtype=torch.uint8)
        self.regions.append(region)
        self.places.append((region.data_ptr(), size, begin))
        self.end = begin + size
        return region

    def finish(self, content: object, identity: bytes) -> None:
        """Write the tensors of `content` that are not in the file yet, the pickle and the trailer."""
        of_objects = io.BytesIO()
        _Pickler(of_objects, self._place).dump(content)
        pickled = pickle.dumps((sorted(self.places), of_objects.getvalue()))
        self.file.seek(self.end)
        self.file.write(pickled + _TRAILER.pack(self.end, len(pickled), identity, _digest(pickled)))
        self.file.truncate()
        self.file.flush()

    def _place(self, tensor: Tensor) -> int:
        """Return a tensor's offset in the file, after writing the tensor if the file does not have it yet."""
        address = tensor.data_ptr()
        for begin, size, offset in self.places:
            if begin <= address < begin + size:
                return offset + address - begin
        assert tensor.is_contiguous(), "weights are contiguous"
        begin = _aligned(self.end, _ALIGNMENT)
        self.file.seek(begin)
        self.file.write(as_array(tensor.reshape(-1).view(torch.uint8)).data)
        self.places.append((address, tensor.nbytes, begin))
        self.end = begin + tensor.nbytes
        return begin


class _Pickler(pickle.Pickler):
    """Pickles objects that contain tensors and structs: a tensor as its place in the file, a struct as its
    bytes."""

    def __init__(self, file: BinaryIO, place: Callable[[Tensor], int]) -> None:
        super().__init__(file)
        self._place = place

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, Tensor):
            return Tensor, self._place(obj), str(obj.dtype).removeprefix("torch."), tuple(obj.shape)
        if isinstance(obj, ctypes.Structure):
            return type(obj), bytes(obj)
        return None


class _Unpickler(pickle.Unpickler):
    """Restores objects whose tensors are in mapped memory."""

    def __init__(self, pickled: bytes, memory: mmap.mmap) -> None:
        self._places, of_objects = pickle.loads(pickled)
        super().__init__(io.BytesIO(of_objects))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        kind, *value = pid
        if kind is Tensor:
            offset, name, shape = value
            dtype: torch.dtype = getattr(torch, name)
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            return self._memory[offset:end].view(dtype).view(shape)
        restored = kind.from_buffer_copy(*value)
        self._relocate(restored)
        return restored

    def _relocate(self, restored: ctypes.Structure) -> None:
        """Replace the addresses in a struct and in its nested structs by addresses in the mapped memory."""
        for name, kind, *_ in restored._fields_:
            value = getattr(restored, name)
            if isinstance(value, ctypes.Structure):
                self._relocate(value)
            elif kind is ctypes.c_void_p and value is not None:
                begin, size, offset = self._place_of(value)
                assert begin <= value < begin + size, f"{name} points to a tensor in the file"
                setattr(restored, name, self._memory.data_ptr() + offset + value - begin)

    def _place_of(self, address: int) -> tuple[int, int, int]:
        """Return the last of `places` that begins at or before an address."""
        return self._places[bisect_right(self._places, (address, math.inf)) - 1]


@functools.cache
def _sources() -> bytes:
    """Return a digest of torch's version and of this package's sources: a change of either may change the
    layout."""
    files = (file for pattern in ("*.py", "*.h", "*.cpp") for file in sorted(_PACKAGE.rglob(pattern)))
    return _digest(torch.__version__.encode(), *(file.read_bytes() for file in files))


def _read_ahead(path: Path, size: int) -> None:
    """Let the kernel read a file into the page cache while loading continues, if enough memory is free."""

    def read() -> None:
        with suppress(OSError), open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    if size < available_cpu_memory():
        threading.Thread(target=read, name="inflight-read-ahead", daemon=True).start()


def _encoded(value: object) -> bytes:
    return repr(value).encode(errors="surrogateescape")


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _digest(*contents: bytes, size: int = _DIGEST_BYTES) -> bytes:
    digest = blake2b(digest_size=size)
    for content in contents:
        digest.update(content)
    return digest.digest()
