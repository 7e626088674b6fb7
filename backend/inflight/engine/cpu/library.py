"""The compiled code: a library that came with the package, or one that the machine's compiler makes of source/.

A wheel brings libraries (scripts/wheel), which `prebuild` has put beside the sources, and they come first, if they
are of these sources. What is compiled here takes up to twenty seconds when it is first needed. It is kept in the
user's cache folder, under a name that changes with the sources, the compiler, the C library and the processor, so
that later starts find it. At a library's end stands a digest of it, as a file that was cut short would end the
process that runs it.
Any thread; of several processes one builds, and the others wait for it. Imports no torch.

Whoever builds removes what nobody has loaded for 30 days. A library's modification time is when it was last loaded
or built. Every version of the sources, the compiler and the processor has libraries of its own, and nothing tells
which of them are still installed somewhere, so age decides. A process that has loaded a library that is removed
takes no harm: the file lives on until the last of them has ended, and is built again when it is needed again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from inflight.engine.cpu.layout import check_layout
from inflight.engine.cpu.structs import declare
from inflight.errors import ConfigError
from inflight.progress import compile_progress

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_PREBUILT = Path(__file__).parent / "prebuilt"
_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-shared")
_ELEMENTS = {"float32": "F32", "bfloat16": "Bf16"}
_TARGET_VARIABLE = "INFLIGHT_CPU_TARGET"
_BUILD_VARIABLE = "INFLIGHT_CPU_BUILD"
_BUILD_TIMEOUT_S = 600.0  # fifty times what it takes on a machine that does nothing else
_VERSION_TIMEOUT_S = 10.0
_TICK_S = 1.0
_DIGEST_BYTES = 16
_BUILD_PREFIX = "build-"  # of a build's folder, which is left behind only if its process was killed
_UNUSED_S = 30 * 24 * 3600.0
_ABANDONED_S = 24 * 3600.0  # far longer than any build takes
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PRODUCT_CHECKS = (  # in the order of ProductCheck of source/amx_check.h
    "",
    "the kernel does not let this process use tiles",
    "its products are wrong on this processor",
    "its products end the process",
)
_NONE_PREBUILT = "no library for it came with the package"


class CannotBuild(Exception):
    """There is no compiled code on this machine; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A kind of processor that the sources have registers and products for (source/lanes.h, products.h).

    Attributes:
        name: As the environment variable has it that asks for this one.
        int8_products: The instruction that multiplies weights of 8 and 4 bits.
        here: Compiler flags for the processor of this machine.
        anywhere: Compiler flags for all that have the instruction sets.
        needed: Instruction sets that all of its code needs; names as in /proc/cpuinfo.
        for_bfloat16: What code for bfloat16 needs beyond, with the compiler's flags.
        for_int8: What code for weights of 8 and 4 bits needs beyond, likewise.
        dtypes: What it is faster for than the next target.
        caveat: What users are told of it beside its name.
    """

    name: str
    int8_products: str
    here: tuple[str, ...]
    anywhere: tuple[str, ...]
    needed: frozenset[str]
    for_bfloat16: Mapping[str, str]
    for_int8: Mapping[str, str]
    dtypes: frozenset[str] = frozenset(_ELEMENTS)
    caveat: str = ""

    def instruction_sets(self, dtype: str, int8: bool = False) -> frozenset[str]:
        """Return the instruction sets that code for models of this dtype needs."""
        return self.needed | self._beyond(dtype, int8).keys()

    def flags_anywhere(self, dtype: str, int8: bool = False) -> tuple[str, ...]:
        """Compiler flags of code for every processor that has the instruction sets."""
        return (*self.anywhere, *self._beyond(dtype, int8).values())

    def _beyond(self, dtype: str, int8: bool) -> dict[str, str]:
        for_bfloat16 = self.for_bfloat16 if dtype == "bfloat16" else {}
        return {**for_bfloat16, **(self.for_int8 if int8 else {})}


_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = ("-march=x86-64-v4", "-mtune=icelake-server")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
_AMX_FLAGS = ("-mamx-tile", "-DINFLIGHT_AMX")
_DOT_FLAGS, _BF16_FLAGS = ("-march=armv8.2-a+dotprod",), ("-march=armv8.2-a+dotprod+bf16",)
_GENERIC_FLAGS = ("-DINFLIGHT_GENERIC",)
_OF_MACHINES = {
    "x86_64": (
        Target(
            "amx",
            "amx",
            ("-march=native", *_AMX_FLAGS),
            (*_AVX512_FLAGS, *_AMX_FLAGS),
            _AVX512 | {"amx_tile"},
            {"avx512_bf16": "-mavx512bf16", "amx_bf16": "-mamx-bf16"},
            {"avx512_vnni": "-mavx512vnni", "amx_int8": "-mamx-int8"},
            frozenset({"bfloat16"}),
            "never executed on hardware by those who wrote it",
        ),
        Target(
            "avx512",
            "vnni",
            ("-march=native",),
            _AVX512_FLAGS,
            _AVX512,
            {"avx512_bf16": "-mavx512bf16"},
            {"avx512_vnni": "-mavx512vnni"},
        ),
        # Not -march=native: a processor with AVX-512 that lacks a part of it runs this code, too. For others it is
        # tuned for Zen 3: tuned for none, long prompts took a quarter longer there.
        Target(
            "avx2",
            "avx2",
            (*_AVX2_FLAGS, "-mtune=native"),
            (*_AVX2_FLAGS, "-mtune=znver3"),
            frozenset({"avx2", "fma", "f16c"}),
            {},
            {},
        ),
    ),
    "aarch64": (
        Target(
            "neon-bf16",
            "sdot",
            _BF16_FLAGS,
            _BF16_FLAGS,
            frozenset({"asimd", "atomics", "asimddp", "bf16"}),
            {},
            {},
        ),
        Target(
            "neon-dot", "sdot", _DOT_FLAGS, _DOT_FLAGS, frozenset({"asimd", "atomics", "asimddp"}), {}, {}
        ),
        Target("neon", "neon", (), (), frozenset({"asimd"}), {}, {}),
    ),
}
_GENERIC = Target("generic", "generic", _GENERIC_FLAGS, _GENERIC_FLAGS, frozenset(), {}, {})
TARGETS = (*_OF_MACHINES.get(platform.machine(), ()), _GENERIC)
"""Those of this machine, the fastest first; the last one runs everywhere."""


def targets_of_compiler() -> tuple[Target, ...]:
    """Return the targets of the machines that the compiler compiles for: `CXX` may name a cross compiler."""
    said = _run([_find_compiler(), "-dumpmachine"], _VERSION_TIMEOUT_S).stdout.decode()
    return (*_OF_MACHINES.get(said.partition("-")[0], ()), _GENERIC)


class CompiledCode(ctypes.CDLL):
    """A library that has been loaded.

    Attributes:
        description: What `describe_target` says of its target, or why a faster one was left out.
    """

    description = ""


def load_library(dtype: str, int8: bool = False, rounded_cache: bool = False) -> CompiledCode:
    """Return the code for models of this dtype; CannotBuild, with the reason, where this machine has none.

    Targets whose products are found wrong on this machine are left out, with a warning.

    Args:
        dtype: Of activations.
        int8: Whether weights are.
        rounded_cache: Whether the KV cache may be one of 8 bits.
    """
    targets, flags = _runnable_targets(dtype, int8), _processor_flags()
    why = _why_not_faster(targets[0], dtype, int8)
    for target in targets:
        library = _load(target, flags, dtype, int8, rounded_cache)
        distrust = _PRODUCT_CHECKS[library.check_products()]
        if not distrust:
            library.description = _describe(target, why)
            return library
        why = f"{target.name} is left out, as {distrust}"
        _log.warning("compiled layers: %s", why)
    raise CannotBuild(why)


def foresee(dtype: str, int8: bool = False, rounded_cache: bool = False) -> str:
    """Tell in words where `load_library` will take the code from, without loading or compiling it.

    Raises CannotBuild, with the reason, where it is known already that there will be none.
    """
    target, flags = find_target(dtype, int8), _processor_flags()
    refusal = _refuse_prebuilt(target, dtype, int8)
    if not refusal:
        return "which came with the package"
    compiler = _compiler_command(target.here, dtype, int8, rounded_cache, refusal)
    folder = _cache_folder()
    why = "" if refusal == _NONE_PREBUILT else f": {refusal}"
    if folder is None:
        return f"{compiler[0]} compiles them at every start, as there is no folder to keep them in{why}"
    if _is_whole(folder / f"decoder-{_key(compiler, flags)}.so"):
        return f"kept from an earlier start{why}"
    return f"{compiler[0]} compiles them at the first start{why}"


def find_target(dtype: str, int8: bool = False) -> Target:
    """Return the fastest target that the processor has all instructions of.

    The environment variable INFLIGHT_CPU_TARGET leaves only the target of that name to choose from. CannotBuild
    where the processor lacks an instruction of that one, or there is none of that name, or none for the dtype.
    """
    return _runnable_targets(dtype, int8)[0]


def describe_target(dtype: str, int8: bool = False) -> str:
    """Return the target of `find_target` in words, and why it is not the next faster one."""
    target = find_target(dtype, int8)
    return _describe(target, _why_not_faster(target, dtype, int8))


def _describe(target: Target, why: str) -> str:
    name = f"{target.name}, {target.caveat}" if target.caveat else target.name
    return f"{name}: {why}" if why else name


def _why_not_faster(target: Target, dtype: str, int8: bool) -> str:
    """The reason why the next faster target, of those that are tried, is not taken; empty for the fastest."""
    tried = [each for each in _allowed_targets(dtype) if each is target or not each.caveat]
    place = tried.index(target)
    return _lacking(tried[place - 1], dtype, int8) if place else ""


def _runnable_targets(dtype: str, int8: bool) -> list[Target]:
    """The targets that the processor has all instructions of, the fastest first; CannotBuild without one."""
    allowed = _allowed_targets(dtype)
    if runnable := [target for target in allowed if not _lacking(target, dtype, int8)]:
        return runnable
    wanted = os.environ.get(_TARGET_VARIABLE, "")
    forced = f", which {_TARGET_VARIABLE}={wanted} needs" if wanted else ""
    raise CannotBuild(_lacking(allowed[-1], dtype, int8) + forced)


def _allowed_targets(dtype: str) -> list[Target]:
    """Return the targets for a dtype, or the one that the environment names; CannotBuild without one."""
    if dtype not in _ELEMENTS:
        raise CannotBuild(f"it computes in {' and '.join(_ELEMENTS)}, not in {dtype}")
    wanted = os.environ.get(_TARGET_VARIABLE, "")
    if wanted not in ("", *(target.name for target in TARGETS)):
        names = " or ".join(target.name for target in TARGETS)
        raise CannotBuild(f"{_TARGET_VARIABLE} is {wanted!r}, expected {names}")
    allowed = [target for target in TARGETS if dtype in target.dtypes and wanted in ("", target.name)]
    if not allowed:
        raise CannotBuild(f"{_TARGET_VARIABLE} is {wanted}, which does not compute in {dtype}")
    return allowed


def _lacking(target: Target, dtype: str, int8: bool) -> str:
    """Return the reason why the processor does not run a target's code; empty if it does."""
    lacking = target.instruction_sets(dtype, int8) - _processor_flags()
    return f"the processor lacks {', '.join(sorted(lacking))}" if lacking else ""


def begin_loading(dtype: str, int8: bool = False, rounded_cache: bool = False) -> None:
    """Begin, on a thread, what `load_library` would wait for. That will raise what goes wrong here."""

    def load() -> None:
        with contextlib.suppress(CannotBuild, ConfigError):
            load_library(dtype, int8, rounded_cache)

    if _cache_folder() is not None:  # without one, nobody would find what has been built
        threading.Thread(target=load, name="inflight-compile", daemon=True).start()


def prebuild(target: Target, dtype: str, int8: bool = False) -> Path:
    """Compile into the package, for every processor that has a target's instructions and for KV caches of every
    kind; CannotBuild if that fails.
    """
    path = _prebuilt_path(target, dtype, int8)
    try:
        path.parent.mkdir(exist_ok=True)
        _build(_compiler_command(target.flags_anywhere(dtype, int8), dtype, int8, rounded_cache=True), path)
    except OSError as error:
        raise CannotBuild(f"{path} cannot be written: {error}") from error
    return path


@functools.cache
def _load(
    target: Target, flags: frozenset[str], dtype: str, int8: bool, rounded_cache: bool = False
) -> CompiledCode:
    refusal = _refuse_prebuilt(target, dtype, int8)
    if not refusal:
        prebuilt = _prebuilt_path(target, dtype, int8)
        try:
            return _load_file(prebuilt)
        except OSError as error:
            refusal = f"{prebuilt.name} of the package cannot be loaded: {error}"
    compiler = _compiler_command(target.here, dtype, int8, rounded_cache, refusal)
    if refusal != _NONE_PREBUILT:
        _log.info("the layers are compiled on this machine: %s", refusal)
    name = f"decoder-{_key(compiler, flags)}.so"
    folder = _cache_folder()
    try:
        if folder is not None:
            return _open(compiler, folder / name)
        with tempfile.TemporaryDirectory(prefix="inflight-") as passing:  # what is loaded may be deleted
            return _open(compiler, Path(passing, name))
    except OSError as error:
        raise CannotBuild(f"{name} cannot be kept or loaded: {error}") from error


def _open(compiler: list[str], path: Path) -> CompiledCode:
    """Load the library at `path`, built anew if it cannot be used; OSError if even a new one cannot be loaded."""
    unusable = None
    _mark_used(path)
    if _is_whole(path):
        try:
            return _load_file(path)
        except OSError:
            # Another process may have removed it just now, as too old.
            with contextlib.suppress(FileNotFoundError):
                unusable = path.stat().st_ino
    with _one_at_a_time(path.parent):
        # Otherwise another process has built it meanwhile.
        if not _is_whole(path) or path.stat().st_ino == unusable:
            _build(compiler, path)
            _prune(path.parent, but=path)
    try:
        return _load_file(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _load_file(path: Path) -> CompiledCode:
    """Load a library from its file, or from memory where that folder's file system lets nothing be run.

    ConfigError if it is of other sources than this version's, as what was compiled into the package may be.
    """
    try:
        library = CompiledCode(str(path))
    except OSError as error:
        try:
            library = _load_from_memory(path)
        except OSError:
            raise error from None
    declare(library)
    check_layout(library)
    return library


def _load_from_memory(path: Path) -> CompiledCode:
    handle = os.memfd_create(path.name)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(path.read_bytes())
        # The loader takes libraries of the same name for the same one: the number must not be given out again.
        return CompiledCode(f"/proc/self/fd/{handle}")
    except BaseException:  # whatever it is, nobody else would close the file
        os.close(handle)
        raise


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
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BUILD_PREFIX) as folder:
        built = Path(folder, path.name)
        with compile_progress(_described(compiler)) as tick:
            _compile(compiler, built, tick)
        content = built.read_bytes()
        built.write_bytes(content + _digest(content))
        os.replace(built, path)


def _described(compiler: list[str]) -> str:
    """Return the kind of code that a compiler's command makes, in a word."""
    if "-DINFLIGHT_INT8" in compiler:
        return "int8"
    return next(dtype for dtype, element in _ELEMENTS.items() if f"-DINFLIGHT_ELEMENT={element}" in compiler)


def _compile(compiler: list[str], target: Path, tick: Callable[[], None]) -> None:
    """Run a compiler, and call `tick` once a second meanwhile; CannotBuild with what it said if it fails."""
    command = [*compiler, str(_SOURCES / "decoder.cpp"), "-o", str(target)]
    done = _run(command, _BUILD_TIMEOUT_S, tick)
    if done.returncode != 0 or not target.exists():
        said = done.stderr.decode(errors="replace").strip()
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise CannotBuild(f"{compiler[0]} failed with status {done.returncode}: {first.strip() or 'no word'}")


def _run(
    command: list[str], timeout_s: float, tick: Callable[[], None] = lambda: None
) -> subprocess.CompletedProcess[bytes]:
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        ) as process:
            try:
                said = _communicate(process, timeout_s, tick)
            except BaseException:  # also Ctrl-C: the compiler must not run on
                os.killpg(process.pid, signal.SIGKILL)  # it is several processes
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _communicate(
    process: subprocess.Popen[bytes], timeout_s: float, tick: Callable[[], None]
) -> tuple[bytes, bytes]:
    """Return a process's stdout and stderr when it ends; TimeoutExpired where it takes longer."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > _TICK_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_TICK_S)
        tick()
    return process.communicate(timeout=max(0.0, left))


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _compiler_command(
    of_target: tuple[str, ...], dtype: str, int8: bool, rounded_cache: bool = False, refusal: str = ""
) -> list[str]:
    """With a target's flags; without source and result. CannotBuild without a compiler.

    `refusal`: why there is something to compile, which that error says too.
    """
    try:
        compiler = _find_compiler()
    except CannotBuild as error:
        raise CannotBuild(f"{error}, and {refusal}" if refusal else str(error)) from None
    command = [compiler, *_FLAGS, *of_target, f"-DINFLIGHT_ELEMENT={_ELEMENTS[dtype]}"]
    wanted = {"-DINFLIGHT_INT8": int8, "-DINFLIGHT_ROUNDED_CACHE": rounded_cache}
    return [*command, *(flag for flag, is_wanted in wanted.items() if is_wanted)]


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted, "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            if wanted and name != wanted:
                _log.warning("CXX is %s, which is no program: compiling with %s", wanted, found)
            return found
    raise CannotBuild("there is no C++ compiler (CXX, c++, g++ or clang++)")


def _key(compiler: list[str], flags: frozenset[str]) -> str:
    version = _run([compiler[0], "--version"], _VERSION_TIMEOUT_S).stdout
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").encode()
    return _digest_of_sources(version, libc, *(flag.encode() for flag in (*compiler[1:], *sorted(flags))))


def _prebuilt_path(target: Target, dtype: str, int8: bool) -> Path:
    return _PREBUILT / f"{_prebuilt_stem(target, dtype, int8)}{_digest_of_sources(dtype.encode())}.so"


def _prebuilt_stem(target: Target, dtype: str, int8: bool) -> str:
    return f"decoder-{'int8' if int8 else dtype}-{target.name}-"


def _refuse_prebuilt(target: Target, dtype: str, int8: bool) -> str:
    """Return the reason why the library that came with the package is not used; empty if it is."""
    wanted = os.environ.get(_BUILD_VARIABLE, "")
    if wanted == "local":
        return f"{_BUILD_VARIABLE} is local"
    if wanted:
        raise CannotBuild(f"{_BUILD_VARIABLE} is {wanted!r}, expected local")
    path = _prebuilt_path(target, dtype, int8)
    if _is_whole(path):
        return ""
    if path.exists():
        return f"{path.name} of the package is damaged"
    others = sorted(_PREBUILT.glob(f"{_prebuilt_stem(target, dtype, int8)}*.so"))
    return f"{others[0].name} of the package was built from other sources" if others else _NONE_PREBUILT


def _digest_of_sources(*more: bytes) -> str:
    digest = blake2b(digest_size=12)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(b"\0".join(more))
    return digest.hexdigest()


def _cache_folder() -> Path | None:
    """The folder for compiled code, which only this user may write, as its files are run; None: there is none."""
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
        text = _CPUINFO.read_text()
    except OSError:
        return frozenset()
    names = "flags", "Features"  # on x86, on Arm
    line = next((line for line in text.splitlines() if line.startswith(names)), "")
    return frozenset(line.partition(":")[2].split())


def _mark_used(library: Path) -> None:
    """Note that a library is being loaded; if it is not there, or cannot be marked, nothing."""
    with contextlib.suppress(OSError):
        os.utime(library)


def _prune(folder: Path, but: Path) -> None:
    """Remove the libraries in a cache folder that nobody has loaded for 30 days, and what dead builds left.

    Called by whoever has just built `but`, which stays. What cannot be removed stays too.
    """
    now = time.time()
    for path in folder.glob("decoder-*.so"):
        if path != but and now - _modified(path) > _UNUSED_S:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"{_BUILD_PREFIX}*"):
        if now - _modified(path) > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    """Seconds since the epoch; the far future for what has gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")
