"""The compiled code: a library from the package, or one that this machine's compiler builds from source/.

A wheel includes libraries (scripts/wheel), which `prebuild` has put beside the sources; they take precedence
if they were built from these sources. Otherwise compiling takes up to twenty seconds at the first use. The
compiled library is kept in the user's cache folder, under a name that depends on the sources, the compiler, the C
library and the processor, so that later starts find it. A library's file ends with a digest of its content,
because loading a truncated file would kill the process.
Any thread; if several processes need a library, one builds it and the others wait. Imports no torch.

After a build, libraries that were not loaded for 30 days are removed. A library's modification time is the
time when it was last loaded or built. Every version of the sources, the compiler and the processor has its
own libraries, and it cannot be known which versions are still installed, so age decides. Removing a loaded
library does no harm: its data exists until the last process that loaded it ends, and the library is built
again when it is needed.
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
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from inflight import environment
from inflight.engine.cpu import layout
from inflight.engine.cpu.structs import declare
from inflight.errors import ConfigError
from inflight.progress import compile_progress
from inflight.user_cache import cache_folder, mark_used, modified_s, remove_unused

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_PREBUILT = Path(__file__).parent / "prebuilt"
_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-shared")
_ELEMENTS = {"float32": "F32", "bfloat16": "Bf16"}
_TARGET_VARIABLE = "INFLIGHT_CPU_TARGET"
_BUILD_VARIABLE = "INFLIGHT_CPU_BUILD"
_PARTS_VARIABLE = "INFLIGHT_CPU_PARTS"
_BUILD_TIMEOUT_S = 600.0  # fifty times the duration of a build on an idle machine
_VERSION_TIMEOUT_S = 10.0
_TICK_S = 1.0
_DIGEST_BYTES = 16
_BUILD_PREFIX = "build-"  # name of a build's temporary folder, which remains only if the process was killed
_ABANDONED_S = 24 * 3600.0  # far longer than any build
_WRONG_PRODUCTS = {
    layout.TILES_NOT_PERMITTED: "the kernel does not let this process use tiles",
    layout.PRODUCTS_ARE_OFF: "its products are wrong on this processor",
    layout.PRODUCTS_CRASH: "its products kill the process",
}
"""Faults that `check_products` may find."""
_NONE_PREBUILT = "no library for it came with the package"


class CannotBuild(Exception):
    """There is no compiled code for this machine; the message is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A kind of processor for which the sources have registers and products (source/lanes.h, products.h).

    Attributes:
        name: Name of the target, as in the environment variable that selects one.
        int8_products: The instruction that multiplies weights of 8 and 4 bits.
        here: Compiler flags for this machine's processor.
        anywhere: Compiler flags for all processors with the instruction sets.
        needed: Instruction sets that all code of the target needs, by their names in /proc/cpuinfo.
        for_bfloat16: Further instruction sets for bfloat16, with the compiler flag of each.
        for_int8: Further instruction sets for weights of 8 and 4 bits, with the compiler flag of each.
        dtypes: Dtypes for which this target is faster than the next one.
        caveat: A remark for users, shown with the target's name.
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
        """Return the compiler flags for all processors that have the instruction sets."""
        return (*self.anywhere, *self._beyond(dtype, int8).values())

    def _beyond(self, dtype: str, int8: bool) -> dict[str, str]:
        for_bfloat16: Mapping[str, str] = self.for_bfloat16 if dtype == "bfloat16" else {}
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
            "not yet run on hardware by this project",
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
        # Not -march=native: processors that have AVX-512 only in part run this code too. For other machines, the
        # code is tuned for Zen 3: without tuning, long prompts took a quarter longer on that processor.
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
"""Targets of this machine, fastest first; the last one runs everywhere."""


def targets_of_compiler() -> tuple[Target, ...]:
    """Return the targets of the architecture that the compiler compiles for; `CXX` may name a cross compiler."""
    said = _run([_find_compiler(), "-dumpmachine"], _VERSION_TIMEOUT_S).stdout.decode()
    return (*_OF_MACHINES.get(said.partition("-")[0], ()), _GENERIC)


class CompiledCode(ctypes.CDLL):
    """A loaded shared library of compiled layers, for one target and dtype.

    Attributes:
        description: The result of `describe_target`, or the reason why a faster target was skipped.
        target: Name of the target.
    """

    description = ""
    target = ""


def load_library(dtype: str, int8: bool = False, rounded_cache: bool = False) -> CompiledCode:
    """Load the code for models of this dtype; raise CannotBuild, with the reason, if there is none for this
    machine.

    Targets whose products are wrong on this machine are skipped, with a warning. Raises ConfigError for a value of
    INFLIGHT_CPU_TARGET, INFLIGHT_CPU_BUILD or INFLIGHT_CPU_PARTS that does not exist.

    Args:
        dtype: Dtype of activations.
        int8: Whether weights are int8.
        rounded_cache: Whether the KV cache may be quantized to 8 bits.
    """
    targets, flags = _runnable_targets(dtype, int8), _processor_flags()
    why = _why_not_faster(targets[0], dtype, int8)
    for target in targets:
        library = _load(target, flags, dtype, int8, rounded_cache)
        found: int = library.check_products()
        if found == layout.PRODUCTS_ARE_RIGHT:
            library.description, library.target = _describe(target, why), target.name
            return library
        why = f"{target.name} is left out, as {_WRONG_PRODUCTS[found]}"
        _log.warning("compiled layers: %s", why)
    raise CannotBuild(why)


COMPILED_ONCE = "compiles them at the first start"
"""Words of `foresee` for code that will be compiled and kept."""


def foresee(dtype: str, int8: bool = False, rounded_cache: bool = False) -> str:
    """Describe where `load_library` will get the code, without loading or compiling it.

    Raises CannotBuild, with the reason, if it is already known that there will be no code.
    """
    target, flags = find_target(dtype, int8), _processor_flags()
    refusal = _why_not_prebuilt(target, dtype, int8)
    if not refusal:
        return "which came with the package"
    compiler = _local_command(target, dtype, int8, rounded_cache, refusal)
    folder = cache_folder()
    why = "" if refusal == _NONE_PREBUILT else f": {refusal}"
    if folder is None:
        return f"{compiler[0]} compiles them at every start, as there is no folder to keep them in{why}"
    if _is_whole(folder / f"decoder-{_key(compiler, flags)}.so"):
        return f"kept from an earlier start{why}"
    return f"{compiler[0]} {COMPILED_ONCE}{why}"


def find_target(dtype: str, int8: bool = False) -> Target:
    """Return the fastest target whose instruction sets the processor has.

    The environment variable INFLIGHT_CPU_TARGET restricts the choice to the target of that name. Raises
    CannotBuild if the processor lacks an instruction set or there is no target for the dtype, and ConfigError if
    there is no target of that name.
    """
    return _runnable_targets(dtype, int8)[0]


def describe_target(dtype: str, int8: bool = False) -> str:
    """Describe the target of `find_target`, and why the next faster one is not used."""
    target = find_target(dtype, int8)
    return _describe(target, _why_not_faster(target, dtype, int8))


def _describe(target: Target, why: str) -> str:
    name = f"{target.name}, {target.caveat}" if target.caveat else target.name
    return f"{name}: {why}" if why else name


def _why_not_faster(target: Target, dtype: str, int8: bool) -> str:
    """Return the reason why the next faster allowed target is not used; empty if there is no faster one."""
    tried = [each for each in _allowed_targets(dtype) if each is target or not each.caveat]
    place = tried.index(target)
    return _lacking(tried[place - 1], dtype, int8) if place else ""


def _runnable_targets(dtype: str, int8: bool) -> list[Target]:
    """Return the targets that the processor can run, fastest first; raise CannotBuild if there is none."""
    allowed = _allowed_targets(dtype)
    if runnable := [target for target in allowed if not _lacking(target, dtype, int8)]:
        return runnable
    wanted = os.environ.get(_TARGET_VARIABLE, "")
    forced = f", which {_TARGET_VARIABLE}={wanted} needs" if wanted else ""
    raise CannotBuild(_lacking(allowed[-1], dtype, int8) + forced)


def _allowed_targets(dtype: str) -> list[Target]:
    """Return the targets for a dtype, or the one that the environment names; raise CannotBuild if none fits.

    Raises ConfigError if this machine's architecture has no target of that name.
    """
    if dtype not in _ELEMENTS:
        raise CannotBuild(f"it computes in {' and '.join(_ELEMENTS)}, not in {dtype}")
    wanted = os.environ.get(_TARGET_VARIABLE, "")
    if wanted not in ("", *(target.name for target in TARGETS)):
        names = " or ".join(target.name for target in TARGETS)
        raise ConfigError(f"{_TARGET_VARIABLE} is {wanted!r}, expected {names}")
    allowed = [target for target in TARGETS if dtype in target.dtypes and wanted in ("", target.name)]
    if not allowed:
        raise CannotBuild(f"{_TARGET_VARIABLE} is {wanted}, which does not compute in {dtype}")
    return allowed


def _lacking(target: Target, dtype: str, int8: bool) -> str:
    """Return the reason why the processor cannot run a target's code; empty if it can."""
    lacking = target.instruction_sets(dtype, int8) - _processor_flags()
    return f"the processor lacks {', '.join(sorted(lacking))}" if lacking else ""


def begin_loading(dtype: str, int8: bool = False, rounded_cache: bool = False) -> threading.Thread | None:
    """Start `load_library` on a thread, to save time later; a later `load_library` call raises any errors.

    Returns the thread; None if the result could not be kept.
    """

    def load() -> None:
        with contextlib.suppress(CannotBuild, ConfigError):
            load_library(dtype, int8, rounded_cache)

    if cache_folder() is None:  # the result would be lost
        return None
    thread = threading.Thread(target=load, name="inflight-compile", daemon=True)
    thread.start()
    return thread


def prebuild(target: Target, dtype: str, int8: bool = False) -> Path:
    """Compile a library into the package, and return its path.

    The library runs on all processors with the target's instruction sets, and supports all formats of KV caches.
    Raises CannotBuild if compiling or writing fails.
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
    refusal = _why_not_prebuilt(target, dtype, int8)
    if not refusal:
        prebuilt = _prebuilt_path(target, dtype, int8)
        try:
            return _load_file(prebuilt)
        except OSError as error:
            refusal = f"{prebuilt.name} of the package cannot be loaded: {error}"
    compiler = _local_command(target, dtype, int8, rounded_cache, refusal)
    if refusal != _NONE_PREBUILT:
        _log.info("the layers are compiled on this machine: %s", refusal)
    name = f"decoder-{_key(compiler, flags)}.so"
    folder = cache_folder()
    try:
        if folder is not None:
            return _open(compiler, folder / name)
        with tempfile.TemporaryDirectory(prefix="inflight-") as passing:  # a loaded library may be deleted
            return _open(compiler, Path(passing, name))
    except OSError as error:
        raise CannotBuild(f"{name} cannot be kept or loaded: {error}") from error


def _open(compiler: list[str], path: Path) -> CompiledCode:
    """Load the library at `path`, rebuilding it if unusable; raise OSError if a new one cannot be loaded."""
    unusable = None
    mark_used(path)
    if _is_whole(path):
        try:
            return _load_file(path)
        except OSError:
            # Another process may just have removed it because of its age.
            with contextlib.suppress(FileNotFoundError):
                unusable = path.stat().st_ino
    with _one_at_a_time(path.parent):
        # Otherwise another process has rebuilt it meanwhile.
        if not _is_whole(path) or path.stat().st_ino == unusable:
            _build(compiler, path)
            _prune(path.parent, but=path)
    try:
        return _load_file(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _load_file(path: Path) -> CompiledCode:
    """Load a library from its file, or from memory if the folder's file system does not allow execution.

    Raises ConfigError if it was built from other sources, as a library in the package may be.
    """
    try:
        library = CompiledCode(str(path))
    except OSError as error:
        try:
            library = _load_from_memory(path)
        except OSError:
            raise error from None
    declare(library)
    layout.check_layout(library)
    return library


def _load_from_memory(path: Path) -> CompiledCode:
    handle = os.memfd_create(path.name)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(path.read_bytes())
        # The loader identifies libraries by name, so the descriptor's number must not be reused.
        return CompiledCode(f"/proc/self/fd/{handle}")
    except BaseException:  # of any kind: the file must be closed
        os.close(handle)
        raise


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Generator[None]:
    """Wait for other processes that build; the kernel releases the lock of a process that dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: processes build independently
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
    """Return the dtype that a compiler command compiles code for, for the progress display."""
    if "-DINFLIGHT_INT8" in compiler:
        return "int8"
    return next(dtype for dtype, element in _ELEMENTS.items() if f"-DINFLIGHT_ELEMENT={element}" in compiler)


def _compile(compiler: list[str], target: Path, tick: Callable[[], None]) -> None:
    """Run a compiler, calling `tick` once a second; raise CannotBuild with its output if it fails."""
    command = [*compiler, str(_SOURCES / "decoder.cpp"), "-o", str(target)]
    done = _run(command, _BUILD_TIMEOUT_S, tick)
    if done.returncode != 0 or not target.exists():
        said = done.stderr.decode(errors="replace").strip()
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise CannotBuild(
            f"{compiler[0]} failed with status {done.returncode}: {first.strip() or 'without a message'}"
        )


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
            except BaseException:  # also KeyboardInterrupt: the compiler must not keep running
                os.killpg(process.pid, signal.SIGKILL)  # the compiler consists of several processes
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _communicate(
    process: subprocess.Popen[bytes], timeout_s: float, tick: Callable[[], None]
) -> tuple[bytes, bytes]:
    """Return a process's stdout and stderr when it ends; raise TimeoutExpired if it takes longer."""
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


def _local_command(target: Target, dtype: str, int8: bool, rounded_cache: bool, refusal: str) -> list[str]:
    """Return the compiler command for this machine; with INFLIGHT_CPU_PARTS=all, for all kinds of weights and
    caches, so that one library per dtype serves all models."""
    if environment.read(_PARTS_VARIABLE) == "all":
        int8 = int8 or (dtype == "bfloat16" and not _lacking(target, dtype, int8=True))
        rounded_cache = True
    return _compiler_command(target.here, dtype, int8, rounded_cache, refusal)


def _compiler_command(
    of_target: tuple[str, ...], dtype: str, int8: bool, rounded_cache: bool = False, refusal: str = ""
) -> list[str]:
    """Return the compiler command for a target, without source and result; raise CannotBuild without a compiler.

    `refusal`: the reason why compiling is necessary, which the error message includes.
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
                _log.warning("CXX is %s, which is not an installed program: compiling with %s", wanted, found)
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


def _why_not_prebuilt(target: Target, dtype: str, int8: bool) -> str:
    """Return the reason why the library from the package is not used; empty if it is used."""
    if environment.read(_BUILD_VARIABLE) == "local":
        return f"{_BUILD_VARIABLE} is local"
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


def _processor_flags() -> frozenset[str]:
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return frozenset()
    names = "flags", "Features"  # on x86, on Arm
    line = next((line for line in text.splitlines() if line.startswith(names)), "")
    return frozenset(line.partition(":")[2].split())


def _prune(folder: Path, but: Path) -> None:
    """Remove libraries in a cache folder that were not loaded for 30 days, and the remains of killed builds.

    Called after a build; `but` is the new library, which is kept. Files that cannot be removed are skipped.
    """
    remove_unused(folder, "decoder-*.so", but)
    now = time.time()
    for path in folder.glob(f"{_BUILD_PREFIX}*"):
        if now - modified_s(path) > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)
