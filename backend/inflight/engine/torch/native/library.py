"""The compiled code: built from source/ by the machine's C++ compiler when it is first needed, and kept.

A build takes a few seconds. It is kept in the user's cache folder, under a name that changes with the sources, the
compiler and the processor, so that later starts find it. Any thread; two processes may build at the same time.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

from inflight.engine.torch.native.structs import declare

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
_NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
_OF_DTYPE = {"float32": frozenset(), "bfloat16": frozenset({"avx512_bf16"})}
_INT8 = frozenset({"avx512_vnni"})
_BUILD_TIMEOUT_S = 120


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
    return _load(frozenset(flags))


@functools.cache
def _load(flags: frozenset[str]) -> ctypes.CDLL:
    compiler = _find_compiler()
    path = _cache_folder() / f"decoder-{_key(compiler, flags)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from error
    declare(library)
    return library


def _build(compiler: str, path: Path) -> None:
    _log.info("compiling the decoder's layers, once on this machine")
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as unfinished:
        command = [compiler, *_FLAGS, str(_SOURCES / "decoder.cpp"), "-o", unfinished.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            os.unlink(unfinished.name)
            raise CannotBuild(f"{compiler} cannot be run: {error}") from error
    if done.returncode != 0:
        os.unlink(unfinished.name)
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise CannotBuild(f"{compiler} failed: {first.strip()}")
    os.replace(unfinished.name, path)


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuild("there is no C++ compiler (CXX, c++, g++ or clang++)")


def _key(compiler: str, flags: frozenset[str]) -> str:
    digest = blake2b(digest_size=12)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    digest.update(b"\0".join([version, *(flag.encode() for flag in (*_FLAGS, *sorted(flags)))]))
    return digest.hexdigest()


def _cache_folder() -> Path:
    """Of this user alone: what lies in it is run."""
    candidates = [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]
    for candidate in candidates:
        folder = Path(candidate) / "inflight"
        if Path(candidate).is_absolute():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.geteuid():
                return folder
    return Path(tempfile.mkdtemp(prefix="inflight-"))  # there is no place to keep it


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
