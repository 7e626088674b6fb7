"""Loading the compiled code: it is built once, kept in a safe place, and failures are reported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight.engine.cpu import layout, library, row_kernels
from inflight.engine.cpu.library import CannotBuild, begin_loading, load_library
from inflight.errors import ConfigError
from inflight.sampling.row_kernels import PENALTIES
from tests.engine.cpu import emulation
from tests.engine.kernels import needs_native
from tests.tiers import with_all

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"})
FAILURES = {
    "an error": (
        "echo 'In file x' >&2; echo 'x.h:1: fatal error: no such file' >&2; exit 1",
        "x.h:1: fatal error",
    ),
    "words in no known encoding": (
        "printf '\\377\\376 error' >&2; exit 1",
        "failed with status 1: \ufffd\ufffd error",
    ),
    "silence": ("exit 3", "failed with status 3: without a message"),
    "a signal": ("kill -9 $$", "failed with status -9"),
    "nothing to show for it": ("exit 0", "failed with status 0"),
    "something that cannot be loaded": ('echo junk > "$target"', "cannot be kept or loaded"),
}


@dataclass(frozen=True)
class Machine:
    """A machine with an empty cache, and a shell script as compiler.

    Attributes:
        root: Folder of all its files.
        real: A library that was really compiled.
    """

    root: Path
    real: Path

    def compiler(self, body: str) -> None:
        """Install a compiler that records its run and then executes `body` with `$target`."""
        lines = ("#!/bin/sh", '[ "$1" = --version ] && exec echo 1', f"echo run >> '{self.root}/runs'")
        script = self.root / "bin" / "c++"
        script.write_text("\n".join((*lines, "for target; do :; done", body, "")))
        script.chmod(0o700)

    def working_compiler(self) -> None:
        """Install a compiler that outputs the real library without the digest at its end."""
        self.compiler(f"head -c -{library._DIGEST_BYTES} '{self.real}' > \"$target\"")

    @property
    def num_builds(self) -> int:
        runs = self.root / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    @property
    def cache(self) -> Path:
        return self.root / "cache" / "inflight"

    def kept(self) -> list[Path]:
        return sorted(self.cache.iterdir())

    @property
    def path(self) -> Path:
        """The file of the kept library."""
        command = library._compiler_command(library.find_target("float32").here, "float32", int8=False)
        key = library._key(command, library._processor_flags())
        return self.cache / f"decoder-{key}.so"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    real = Path(load_library("float32")._name)
    if not real.exists():
        pytest.skip("this machine has no place to keep compiled code")
    for name in ("bin", "cache", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("CXX", "INFLIGHT_CPU_BUILD", "INFLIGHT_CPU_PARTS", "INFLIGHT_CPU_TARGET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)  # without its cache
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    return Machine(tmp_path, real)


@needs_native
def test_one_library_has_all_parts_on_request(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.working_compiler()

    def count() -> int:
        before = machine.num_builds
        for has_8_bit_cache in (False, True):
            load_library("float32", rounded_cache=has_8_bit_cache)
        return machine.num_builds - before

    assert count() == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.root / "other"))
    (machine.root / "other").mkdir()
    monkeypatch.setenv("INFLIGHT_CPU_PARTS", "all")
    assert count() == 1


@needs_native
def test_the_library_is_built_once_and_kept(machine: Machine) -> None:
    machine.working_compiler()
    for _ in range(2):
        assert isinstance(load_library("float32"), ctypes.CDLL)
    assert machine.num_builds == 1
    assert machine.kept() == [machine.path]
    assert machine.cache.stat().st_mode & 0o777 == 0o700, "what lies there is run"


@needs_native
@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.9, 1.0])
def test_a_damaged_file_is_built_again(machine: Machine, share: float) -> None:
    """Running code beyond a file's end would kill the process; the last file lacks one byte."""
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    content = machine.real.read_bytes()
    machine.path.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])
    load_library("float32")
    assert machine.num_builds == 1
    assert machine.path.read_bytes() == content


@needs_native
def test_a_changed_file_is_built_again(machine: Machine) -> None:
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    content = bytearray(machine.real.read_bytes())
    content[len(content) // 2] ^= 1
    machine.path.write_bytes(content)
    load_library("float32")
    assert machine.num_builds == 1


@needs_native
def test_a_complete_file_that_cannot_be_loaded_is_built_again_once(machine: Machine) -> None:
    """Such a file may, for example, have been built with another C library."""
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    junk = b"no library"
    machine.path.write_bytes(junk + library._digest(junk))
    for _ in range(2):
        assert isinstance(load_library("float32"), ctypes.CDLL)
    assert machine.num_builds == 1
    assert machine.path.read_bytes() == machine.real.read_bytes()


@needs_native
def test_a_library_in_a_noexec_folder_is_loaded_from_memory(machine: Machine) -> None:
    """The cache folder is on a file system mounted noexec, in a mount namespace of the test's own."""
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    program = machine.root / "program.py"
    program.write_text(NOEXEC_PROGRAM)
    mount = 'mount -t tmpfs -o noexec,mode=700 none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, machine.cache, sys.executable, program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this process may not mount anything")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["failed", "loaded", "loaded"]
    assert machine.num_builds == 1, "the second load finds what the first has kept"


NOEXEC_PROGRAM = """
import ctypes
from inflight.engine.cpu import layout, library
from inflight.user_cache import cache_folder
for load in range(2):
    target = library.find_target("float32")
    found = library._load.__wrapped__(target, library._processor_flags(), "float32", False)
    assert found.create.restype is ctypes.c_void_p
    if load == 0:
        kept = next(cache_folder().glob("*.so"))
        try:
            ctypes.CDLL(str(kept))
        except OSError:
            print("failed")
    print("loaded")
"""


@needs_native
def test_libraries_loaded_from_memory_are_not_mixed_up(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader identifies libraries by name, which for these is the number of an open file."""
    other = tmp_path / "other.so"
    subprocess.run(
        ["cc", "-shared", "-x", "c", "-", "-o", other], input=b"int other;", check=True, timeout=60
    )
    first, second = library._load_from_memory(machine.real), library._load_from_memory(other)
    assert hasattr(first, "create") and not hasattr(second, "create")
    assert hasattr(second, "other")


@needs_native
def test_a_prebuilt_library_needs_no_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.working_compiler()
    path = library.prebuild(library.find_target("float32"), "float32")
    assert machine.num_builds == 1
    monkeypatch.setenv("PATH", str(machine.root / "nothing"))
    assert load_library("float32")._name == str(path)
    with pytest.raises(CannotBuild, match="there is no C"):
        load_library("bfloat16")


@needs_native
def test_a_library_prebuilt_from_other_sources_is_not_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.working_compiler()
    prebuilt = library.prebuild(library.find_target("float32"), "float32")
    sources = machine.root / "source"
    shutil.copytree(library._SOURCES, sources)
    (sources / "team.h").write_text("// changed")
    monkeypatch.setattr(library, "_SOURCES", sources)
    with caplog.at_level("INFO"):
        assert Path(load_library("float32")._name).parent == machine.cache
    assert machine.num_builds == 2
    refusal = f"{prebuilt.name} of the package was built from other sources"
    assert f"the layers are compiled on this machine: {refusal}" in caplog.messages
    assert library.foresee("float32") == f"kept from an earlier start: {refusal}"
    monkeypatch.setenv("PATH", str(machine.root / "nothing"))
    for find in (load_library, library.foresee):
        with pytest.raises(CannotBuild, match=r"^there is no C\+\+ compiler \(.*\), and ") as error:
            find("float32")
        assert str(error.value).endswith(refusal)


@needs_native
@pytest.mark.parametrize("harm", ["cut short", "no library"])
def test_a_damaged_prebuilt_library_is_built_here(
    machine: Machine, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that is not a library has the right digest: the loader refuses it, as with a C library too old."""
    machine.working_compiler()
    path = library.prebuild(library.find_target("float32"), "float32")
    content = path.read_bytes()
    path.write_bytes(content[:-1] if harm == "cut short" else b"x" + library._digest(b"x"))
    with caplog.at_level("INFO"):
        assert Path(load_library("float32")._name).parent == machine.cache
    assert machine.num_builds == 2
    why = "is damaged" if harm == "cut short" else "cannot be loaded: "
    assert f"{path.name} of the package {why}" in caplog.text


@needs_native
def test_the_processor_decides_which_prebuilt_library_is_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.working_compiler()
    prebuilt = {target.name: library.prebuild(target, "bfloat16") for target in library.TARGETS}
    monkeypatch.setenv("PATH", str(machine.root / "nothing"))
    every = AVX512 | AVX2
    for flags, expected in ((every, "avx512"), (every - {"avx512_bf16"}, "avx2"), (AVX2, "avx2")):
        monkeypatch.setattr(library, "_processor_flags", lambda flags=flags: flags)
        assert load_library("bfloat16")._name == str(prebuilt[expected])
        assert library.foresee("bfloat16") == "which came with the package"


@needs_native
def test_a_prebuilt_library_is_not_used_if_a_local_build_is_requested(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.working_compiler()
    library.prebuild(library.find_target("float32"), "float32")
    monkeypatch.setenv("INFLIGHT_CPU_BUILD", "local")
    assert library.foresee("float32").endswith(
        "compiles them at the first start: INFLIGHT_CPU_BUILD is local"
    )
    assert Path(load_library("float32")._name).parent == machine.cache
    monkeypatch.setenv("INFLIGHT_CPU_BUILD", "native")
    with pytest.raises(ConfigError, match="INFLIGHT_CPU_BUILD is 'native', expected local"):
        load_library("float32")


def test_a_build_for_many_processors_names_the_instructions_that_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "_find_compiler", lambda: "c++")
    monkeypatch.setattr(library, "_build", lambda command, path: commands.append(command))
    kinds = [("float32", False), ("bfloat16", False), ("bfloat16", True)]
    named = {
        (target.name, *kind): library.prebuild(target, *kind)
        for target in library.TARGETS
        for kind in kinds
        if kind[0] in target.dtypes
    }
    assert len(set(named.values())) == len(named) == 11
    assert not any("native" in flag for command in commands for flag in command)
    assert not any(flag.startswith("-m") for command in commands[-3:] for flag in command)

    def built_with(flag: str) -> set[tuple[str, str, bool]]:
        return {each for each, command in zip(named, commands, strict=True) if flag in command}

    amx, avx512, avx2, generic = (
        {(name, *kind) for kind in kinds if (name, *kind) in named}
        for name in ("amx", "avx512", "avx2", "generic")
    )
    of_int8 = {("amx", "bfloat16", True), ("avx512", "bfloat16", True)}
    assert built_with("-march=x86-64-v4") == amx | avx512
    assert built_with("-mavx2") == avx2 and built_with("-DINFLIGHT_GENERIC") == generic
    assert built_with("-mavx512bf16") == (amx | avx512) - {("avx512", "float32", False)}
    assert built_with("-mavx512vnni") == of_int8
    assert built_with("-mamx-tile") == built_with("-mamx-bf16") == amx
    assert built_with("-mamx-int8") == of_int8 & amx


@needs_native
def test_a_library_that_is_being_compiled_is_not_compiled_twice(machine: Machine) -> None:
    machine.working_compiler()
    begun = begin_loading("float32")
    load_library("float32")
    assert begun is not None
    begun.join()
    assert machine.num_builds == 1


@needs_native
def test_only_one_of_several_processes_builds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders without common state, like separate processes, share only the cache folder."""
    machine.working_compiler()
    meet_before_the_lock(monkeypatch, 3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(load_library, ["float32"] * 3))
    assert all(isinstance(each, ctypes.CDLL) for each in found)
    assert machine.num_builds == 1
    assert machine.kept() == [machine.path]


@needs_native
def test_without_locks_several_build_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have compiled before any of them moves its file into place."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    machine.working_compiler()
    monkeypatch.setattr(library.fcntl, "flock", refuse)
    meeting, compile_ = threading.Barrier(3), library._compile

    def meet(compiler: list[str], target: Path, tick: Callable[[], None]) -> None:
        compile_(compiler, target, tick)
        meeting.wait(30)

    monkeypatch.setattr(library, "_compile", meet)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(load_library, ["float32"] * 3))
    assert all(isinstance(each, ctypes.CDLL) for each in found)
    assert machine.num_builds == 3
    assert machine.kept() == [machine.path]
    assert library._is_whole(machine.path)


DAY_S = 24 * 3600


def aged(path: Path, days: float) -> Path:
    """Create a file, or a folder with one, if it is missing, and set its age in days; return its path."""
    if not path.exists() and path.suffix:
        path.write_bytes(b"of another version")
    elif not path.exists():
        path.mkdir()
        (path / "decoder-1.so").touch()
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))
    return path


@needs_native
def test_a_build_removes_libraries_unused_for_a_month(machine: Machine) -> None:
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    names = {"decoder-a.so": 31, "decoder-b.so": 400, "build-dead": 2}
    old = [aged(machine.cache / name, days) for name, days in names.items()]
    names = {"decoder-c.so": 29, "decoder-d.so": 0, "decoder-e.so": -1, "build-alive": 0.5, "other.so": 400}
    recent = [aged(machine.cache / name, days) for name, days in names.items()]
    load_library("float32")
    assert machine.kept() == sorted([*recent, machine.path])
    assert not any(path.exists() for path in old)


@needs_native
def test_a_loaded_library_counts_as_used(machine: Machine) -> None:
    machine.working_compiler()
    load_library("float32")
    aged(machine.path, 400)
    load_library("float32")
    load_library("bfloat16")
    assert machine.num_builds == 2 and len(machine.kept()) == 2 and machine.path in machine.kept()
    aged(machine.path, 400)
    load_library("bfloat16")
    assert len(machine.kept()) == 2, "only a build looks at what there is"


@needs_native
def test_a_library_that_another_process_runs_may_be_removed(machine: Machine) -> None:
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    other = machine.cache / "decoder-other.so"
    shutil.copyfile(machine.real, other)
    aged(other, 400)
    program = (
        "import ctypes, sys; found = ctypes.CDLL(sys.argv[1]); print('loaded', flush=True); input(); "
        "found.destroy(None); print('ran')"
    )
    command = [sys.executable, "-c", program, str(other)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loaded\n"
        load_library("float32")
        assert not other.exists()
        assert process.communicate("\n", timeout=60)[0] == "ran\n"
    assert process.returncode == 0


@needs_native
def test_a_library_removed_while_being_loaded_is_built_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that removes old files has checked the library's age just before another process marks it as
    used."""
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    shutil.copyfile(machine.real, machine.path)
    is_whole = library._is_whole

    def remove(path: Path) -> bool:
        found = is_whole(path)
        if found:
            path.unlink()
            monkeypatch.setattr(library, "_is_whole", is_whole)
        return found

    monkeypatch.setattr(library, "_is_whole", remove)
    assert isinstance(load_library("float32"), ctypes.CDLL)
    assert machine.num_builds == 1 and machine.kept() == [machine.path]


@needs_native
def test_processes_that_start_at_once_prune_and_load(machine: Machine) -> None:
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    for number in range(50):
        aged(machine.cache / f"decoder-{number}.so", 40)
    load = "from inflight.engine.cpu.library import load_library; load_library(%r)"
    commands = [[sys.executable, "-c", load % dtype] for dtype in ("float32", "bfloat16") * 2]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert machine.num_builds == 2 and len(machine.kept()) == 2 and machine.path in machine.kept()


def test_a_library_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    old = aged(tmp_path / "decoder-a.so", 40)
    monkeypatch.setattr(Path, "unlink", refuse)
    library._prune(tmp_path, but=tmp_path / "decoder-b.so")
    assert old.exists()


def meet_before_the_lock(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let all of them see that there is no library before any of them builds one."""
    meeting, wait = threading.Barrier(count), library._one_at_a_time

    def meet(folder: Path) -> object:
        meeting.wait(30)
        return wait(folder)

    monkeypatch.setattr(library, "_one_at_a_time", meet)


@needs_native
@pytest.mark.parametrize("cache", ["file", "file/below", "relative", ""])
def test_without_a_cache_folder_the_library_is_built_every_time(
    machine: Machine, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.working_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.root / cache) if cache.startswith("file") else cache)
    for _ in range(2):
        load_library("float32")
    assert machine.num_builds == 2
    assert list((machine.root / "tmp").iterdir()) == []


@needs_native
@pytest.mark.parametrize("harm", ["writable by others", "another user's"])
def test_a_folder_that_others_can_write_to_is_not_used(machine: Machine, harm: str) -> None:
    machine.working_compiler()
    machine.cache.mkdir(mode=0o700)
    if harm == "writable by others":
        machine.cache.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(machine.cache, 12345, -1)
    else:
        pytest.skip("only root can give a folder away")
    load_library("float32")
    assert machine.num_builds == 1
    assert machine.kept() == []


@needs_native
def test_a_full_disk_is_reported_and_leaves_no_files(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.working_compiler()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library.os, "replace", fail)
    with pytest.raises(CannotBuild, match="No space left on device"):
        load_library("float32")
    monkeypatch.undo()
    assert machine.kept() == []


@needs_native
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_compiler_is_reported_and_leaves_no_files(machine: Machine, failure: str) -> None:
    body, message = FAILURES[failure]
    machine.compiler(body)
    with pytest.raises(CannotBuild) as error:
        load_library("float32")
    assert message in str(error.value)
    assert machine.kept() == []


@needs_native
@pytest.mark.parametrize("body", ["", "sleep 300"])
def test_a_compiler_that_cannot_be_run_or_does_not_end_is_an_error(
    machine: Machine, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiler is not a program; the other has a hanging child that holds the pipes, and must be killed."""
    monkeypatch.setattr(library, "_BUILD_TIMEOUT_S", 2.0)
    if body:
        machine.compiler(f"{body} & echo $! > '{machine.root}/child'; wait")
    else:
        (machine.root / "bin" / "c++").write_bytes(b"\0\1\2")
        (machine.root / "bin" / "c++").chmod(0o700)
    with pytest.raises(CannotBuild, match="cannot be run: "):
        load_library("float32")
    child = machine.root / "child"
    if child.exists():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(int(child.read_text()))
            assert select.select([handle], [], [], 10)[0], "the compiler's own child goes on"
            os.close(handle)


def test_the_compiler_named_by_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mine", "c++", "clang++"):
        (tmp_path / name).touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "mine")
    assert library._find_compiler() == str(tmp_path / "mine")
    assert not caplog.messages
    monkeypatch.setenv("CXX", "not-there")
    assert library._find_compiler() == str(tmp_path / "c++")
    assert "CXX is not-there, which is not an installed program" in caplog.text
    (tmp_path / "c++").unlink()
    monkeypatch.delenv("CXX")
    assert library._find_compiler() == str(tmp_path / "clang++")


@needs_native
def test_a_library_with_another_weight_layout_is_refused_with_all_differences(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    library._load_file(machine.real)
    monkeypatch.setitem(layout._CONSTANTS, "kPanel", 16)
    monkeypatch.setitem(layout._CONSTANTS, "kNew", 1)
    monkeypatch.delitem(layout._CONSTANTS, "sizeof(Batch)")
    expected = (
        rf"compiled layers {machine.real} are not those of this version: kNew is not there, expected 1; "
        r"kPanel is 32, expected 16; sizeof\(Batch\) is \d+, expected no such number$"
    )
    with pytest.raises(ConfigError, match=expected):
        library._load_file(machine.real)


@needs_native
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bits of kLargestLogit", layout._bits(1e31)),
        ("bits of kMinScale", layout._bits(1e-31)),
        ("kFew", 64),
        ("kGelu", layout.ACTIVATIONS["relu"]),
        ("kFp8Levels", layout.INT8_CACHE),
        ("kProductsCrash", layout.PRODUCTS_ARE_RIGHT),
        ("kWrongTokens", layout.NO_MEMORY),
        ("sizeof(Chance)", 32),
        ("sizeof(Penalties)", 32),
    ],
)
def test_a_library_with_another_constant_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, wrong: int
) -> None:
    right = layout._CONSTANTS[name]
    monkeypatch.setitem(layout._CONSTANTS, name, wrong)
    with pytest.raises(
        ConfigError, match=re.escape(f"this version: {name} is {right}, expected {wrong}") + "$"
    ):
        library._load_file(machine.real)


def test_rows_given_to_compiled_code_have_the_compared_sizes() -> None:
    assert layout._CONSTANTS["sizeof(Penalties)"] == PENALTIES.itemsize
    assert layout._CONSTANTS["sizeof(Chance)"] == row_kernels._CHANCE.itemsize


@needs_native
@pytest.mark.parametrize(
    ("machine", "names"),
    with_all(
        [
            ("x86_64", ["avx2", "generic"]),
            pytest.param("aarch64", ["neon-bf16"], marks=emulation.needs_emulator),
            ("x86_64", ["amx", "avx512"]),
            pytest.param("aarch64", ["neon-dot", "neon"], marks=emulation.needs_emulator),
        ],
        [("x86_64", ["avx2", "generic"]), ("aarch64", ["neon-bf16"])],
    ),
)
def test_the_compiler_accepts_the_code_of_every_target(
    machine: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks syntax and types only, of all parts in bfloat16; the tests of a target compile it to run it."""
    if machine == "aarch64":
        monkeypatch.setenv("CXX", emulation.COMPILER)
    source = Path(layout.__file__).with_name("source") / "decoder.cpp"
    targets = {target.name: target for target in library.targets_of_compiler()}
    for name in names:
        flags = targets[name].flags_anywhere("bfloat16", int8=True)
        command = library._compiler_command(flags, "bfloat16", int8=True, rounded_cache=True)
        subprocess.run([*command, "-fsyntax-only", source], check=True, timeout=300)
