"""The compiled code: built from source/ by the machine's C++ compiler when it is first needed, and kept.

A build takes a few seconds. It is kept in the user's cache folder, under a name that changes with the sources, the
compiler and the processor, so that later starts find it; at its end stands a digest of it, as a file that was cut
short would end the process that runs it. Any thread; of several processes one builds, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from inflight.engine.torch.native.structs import declare

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-shared")
_NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
_OF_DTYPE = {"float32": frozenset(), "bfloat16": frozenset({"avx512_bf16"})}
_ELEMENTS = {"float32": "F32", "bfloat16": "Bf16"}
_INT8 = frozenset({"avx512_vnni"})
_BUILD_TIMEOUT_S = 600.0  # fifty times what it takes on a machine that does nothing else
_VERSION_TIMEOUT_S = 10.0
_DIGEST_BYTES = 16
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CannotBuild(Exception):
    """Why there is no compiled code on this machine."""


def load_library(dtype: str, int8: bool = False) -> ctypes.CDLL:
    """The code for models of this dtype; CannotBuild, with the reason, where this machine has none."""
    if dtype not in _OF_DTYPE:
        raise CannotBuild(f"it computes in {' and '.join(_OF_DTYPE)}, not in {dtype}")
    flags = _processor_flags()
    lacking = (_NEEDED | _OF_DTYPE[dtype] | (_INT8 if int8 else frozenset())) - flags
    if lacking:
        raise CannotBuild(f"the processor lacks {', '.join(sorted(lacking))}")
    return _load(flags, dtype, int8)


@functools.cache
def _load(flags: frozenset[str], dtype: str, int8: bool) -> ctypes.CDLL:
    compiler = _compiler_command(dtype, int8)
    name = f"decoder-{_key(compiler, flags)}.so"
    folder = _cache_folder()
    try:
        if folder is not None:
            return _open(compiler, folder / name)
        with tempfile.TemporaryDirectory(prefix="inflight-") as passing:  # what is loaded may be deleted
            return _open(compiler, Path(passing, name))
    except OSError as error:
        raise CannotBuild(f"{name} cannot be kept or loaded: {error}") from error


def _open(compiler: list[str], path: Path) -> ctypes.CDLL:
    if not _is_whole(path):
        with _one_at_a_time(path.parent):
            if not _is_whole(path):
                _build(compiler, path)
    library = ctypes.CDLL(str(path))
    declare(library)
    return library


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other processes that build; the kernel ends the lock of one that dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several build, each for itself
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build(compiler: list[str], path: Path) -> None:
    _log.info("compiling the decoder's layers, once on this machine")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        _compile(compiler, built)
        content = built.read_bytes()
        built.write_bytes(content + _digest(content))
        os.replace(built, path)


def _compile(compiler: list[str], target: Path) -> None:
    command = [*compiler, str(_SOURCES / "decoder.cpp"), "-o", str(target)]
    done = _run(command, _BUILD_TIMEOUT_S)
    if done.returncode != 0 or not target.exists():
        said = done.stderr.decode(errors="replace").strip()
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise CannotBuild(f"{compiler[0]} failed with status {done.returncode}: {first.strip()}")


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        ) as process:
            try:
                said = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # a compiler is several processes
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _compiler_command(dtype: str, int8: bool) -> list[str]:
    """Without source and target."""
    command = [_find_compiler(), *_FLAGS, f"-DINFLIGHT_ELEMENT={_ELEMENTS[dtype]}"]
    return [*command, "-DINFLIGHT_INT8"] if int8 else command


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuild("there is no C++ compiler (CXX, c++, g++ or clang++)")


def _key(compiler: list[str], flags: frozenset[str]) -> str:
    digest = blake2b(digest_size=12)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = _run([compiler[0], "--version"], _VERSION_TIMEOUT_S).stdout
    digest.update(b"\0".join([version, *(flag.encode() for flag in (*compiler[1:], *sorted(flags)))]))
    return digest.hexdigest()


def _cache_folder() -> Path | None:
    """Where only this user can write, as what lies in it is run; None if there is no place to keep anything."""
    candidates = [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]
    for candidate in candidates:
        folder = Path(candidate) / "inflight"
        if Path(candidate).is_absolute():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                continue
            found = folder.stat()
            is_private = found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS
            if is_private and os.access(folder, os.W_OK):
                return folder
    return None


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
