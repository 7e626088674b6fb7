"""Findings about a machine, with faults planted in a fake /proc, /sys and /dev, or in Python's functions."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.doctor import machine
from inflight.doctor.finding import Finding, Level, examine, worst
from inflight.engine.cpu import library

GREEN, YELLOW, RED = Level
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"})


def only(findings: Iterable[Finding]) -> Finding:
    (found,) = findings
    return found


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("version", "level"), [((3, 9, 2), RED), ((3, 10, 0), GREEN), ((3, 12, 9), GREEN), ((3, 13, 0), RED)]
)
def test_the_python_version_is_checked(version: tuple[int, int, int], level: Level):
    found = only(machine.check_python(version))
    assert found.level is level
    assert ("python3.11" in found.mend) is (level is RED)


def test_installed_packages_are_checked(monkeypatch: pytest.MonkeyPatch):
    needed = ["numpy>=1.26,<2", "no-such-package>=1", 'pytest>=8; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    found = only(machine.check_packages())
    assert found.level is RED and found.says.endswith(": no-such-package") and "scripts/serve" in found.mend
    del needed[1]
    assert only(machine.check_packages()).level is GREEN

    def not_there(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_there)
    found = only(machine.check_packages())
    assert found.level is RED and "inflight is not installed" in found.says


QUOTA = {"proc__self__cgroup": "0::/box\n", "sys__fs__cgroup__box__cpu.max": "450000 100000\n"}
SMALL = QUOTA | {"sys__fs__cgroup__box__cpu.max": "150000 100000\n"}


@pytest.mark.parametrize(
    ("files", "cpus", "level", "says"),
    [
        ({}, 2, GREEN, "2 processors: the engine has 2 threads"),
        ({}, 1, YELLOW, "1 processors: "),
        (QUOTA, 8, GREEN, "8 processors, of which control groups grant 4.5: the engine has 4 threads"),
        (SMALL, 8, YELLOW, "8 processors, of which control groups grant 1.5: "),
    ],
    ids=["two", "one", "quota", "small quota"],
)
def test_usable_processors_are_reported(
    files: dict[str, str], cpus: int, level: Level, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    found = only(machine.check_processors(write(tmp_path, **files)))
    assert found.level is level and found.says.startswith(says)


@pytest.mark.parametrize(("gib", "level"), [(0.5, RED), (2, YELLOW), (16, GREEN)])
def test_available_memory_is_reported(gib: float, level: Level, tmp_path: Path):
    root = write(tmp_path, proc__meminfo=f"MemTotal: 99999999 kB\nMemAvailable: {int(gib * 2**20)} kB\n")
    found = only(machine.check_memory(root))
    assert found.level is level and found.says.startswith(f"{gib:.1f} GiB available")


def test_a_control_groups_memory_limit_counts(tmp_path: Path):
    write(tmp_path, proc__meminfo="MemAvailable: 99999999 kB\n", proc__self__cgroup="0::/\n")
    files = {"memory.max": str(2**30), "memory.current": str(2**29), "memory.stat": "inactive_file 0\n"}
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert only(machine.check_memory(tmp_path)).level is RED


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a compiler, on a processor with all instructions, and with nothing compiled so far."""
    program = tmp_path / "bin" / "c++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho compiler 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "INFLIGHT_CPU_PARTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX512)
    return program


def test_layers_to_be_compiled_are_reported(compiler: Path):
    found = list(machine.check_layers(has_gpu=False))
    assert [each.level for each in found] == [GREEN, GREEN, GREEN]
    assert f"{compiler} compiles them at the first start" in found[0].says
    assert all("(avx512)" in each.says for each in found)


def test_kept_and_prebuilt_compiled_layers_are_found(compiler: Path, tmp_path: Path):
    content = b"code"
    kept = tmp_path / "cache/inflight"
    key = library._key(
        library._compiler_command(library.find_target("float32").here, "float32", False), AVX512
    )
    kept.mkdir(parents=True, mode=0o700)
    (kept / f"decoder-{key}.so").write_bytes(content + library._digest(content))
    prebuilt = library._prebuilt_path(library.find_target("bfloat16"), "bfloat16", False)
    prebuilt.parent.mkdir()
    prebuilt.write_bytes(content + library._digest(content))
    bfloat16, float32, _ = machine.check_layers(has_gpu=False)
    assert bfloat16.says.endswith("which came with the package")
    assert float32.says.endswith("kept from an earlier start")


def test_layers_without_a_compiler_are_yellow(compiler: Path):
    compiler.unlink()
    found = list(machine.check_layers(has_gpu=False))
    assert {each.level for each in found} == {YELLOW}
    assert {each.mend for each in found} == {"apt-get install g++"}
    assert "no C++ compiler" in found[0].says


def test_a_requested_local_build_is_reported(compiler: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFLIGHT_CPU_BUILD", "local")
    found = list(machine.check_layers(has_gpu=False))
    assert [each.level for each in found] == [GREEN, GREEN, GREEN]
    assert found[0].says.endswith("compiles them at the first start: INFLIGHT_CPU_BUILD is local")
    compiler.unlink()
    found = list(machine.check_layers(has_gpu=False))
    assert {each.mend for each in found} == {"unset INFLIGHT_CPU_BUILD"}


def test_wrong_environment_variables_are_red_and_those_of_others_yellow():
    given = {"INFLIGHT_CPU_TARGT": "avx2", "INFLIGHT_ACCESS_LOG": "no", "INFLIGHT_MODEL": "x"}
    value, name, other = machine.check_environment(given)
    assert (value.level, name.level, other.level) == (RED, RED, YELLOW)
    assert "INFLIGHT_ACCESS_LOG is 'no', expected 0 or 1" in value.says
    assert "did you mean INFLIGHT_CPU_TARGET?" in name.says and "INFLIGHT_MODEL has no effect" in other.says


@pytest.mark.parametrize("target", ["avx2", "neon"])
def test_an_impossible_target_of_layers_is_reported(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, target: str
):
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", target)
    found = list(machine.check_layers(has_gpu=False))
    level = YELLOW if target == "avx2" else RED  # another architecture's target is no value at all
    assert {(each.level, each.mend) for each in found} == {(level, "unset INFLIGHT_CPU_TARGET")}
    assert all(target in each.says for each in found)


def test_layers_are_reported_on_a_processor_with_a_part_of_avx512(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = AVX512 - {"avx512_bf16"} | {"avx2", "fma", "f16c"}
    monkeypatch.setattr(library, "_processor_flags", lambda: flags)
    bfloat16, float32, int8 = machine.check_layers(has_gpu=False)
    assert (bfloat16.level, float32.level, int8.level) == (GREEN, GREEN, GREEN)
    assert "(avx512)" in float32.says
    for each in (bfloat16, int8):
        assert "(avx2: the processor lacks avx512_bf16)" in each.says


def test_layers_are_reported_on_a_processor_without_needed_instructions(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset({"avx2", "fma"}))
    found = list(machine.check_layers(has_gpu=False))
    assert {each.level for each in found} == {YELLOW}
    assert all("(generic: the processor lacks f16c)" in each.says for each in found)
    assert all("AVX2" in each.mend for each in found)


def test_layers_are_green_on_a_machine_with_only_the_generic_target(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(library, "TARGETS", library.TARGETS[-1:])
    found = list(machine.check_layers(has_gpu=False))
    assert {each.level for each in found} == {GREEN}
    assert all("(generic)" in each.says for each in found)


def test_cpu_layers_are_not_used_with_a_gpu():
    assert only(machine.check_layers(has_gpu=True)).level is GREEN


@pytest.mark.parametrize(("free_mib", "level"), [(10, RED), (60, YELLOW), (1000, GREEN)])
def test_free_shared_memory_is_checked(
    free_mib: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(free=free_mib << 20, total=1024 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    found = only(machine.check_shared_memory(tmp_path))
    assert found.level is level and (not found.mend or "--shm-size=1g" in found.mend)
    (tmp_path / "inflight-server-abc-1").touch()
    assert "1 files of servers" in only(machine.check_shared_memory(tmp_path)).says


def test_every_model_of_the_repository_needs_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    num_models = len(list((Path(__file__).parents[2] / "model_repository").glob("*/config.pbtxt")))
    for free_mib, level in ((num_models * 4 - 1, RED), (num_models * 4, YELLOW)):
        usage = SimpleNamespace(free=free_mib << 20, total=64 << 20)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder, usage=usage: usage)
        assert only(machine.check_shared_memory(tmp_path)).level is level


def test_missing_shared_memory_is_red(tmp_path: Path):
    found = only(machine.check_shared_memory(tmp_path / "shm"))
    assert found.level is RED and "mount" in found.mend


def test_a_busy_port_is_reported_with_its_process():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = only(machine.check_ports("127.0.0.1", {"grpc": port}))
        assert found.level is RED and "--grpc-port 0" in found.mend
        assert f"(process {os.getpid()}) listens there" in found.says
    found = only(machine.check_ports("127.0.0.1", {"openai": port}))
    assert found.level is GREEN and found.says == "free, for openai"
    http, metrics = machine.check_ports("127.0.0.1", {"http": port, "metrics": port})
    assert http.level is GREEN
    assert metrics.level is RED and "given to http too" in metrics.says and "--metrics-port 0" in metrics.mend
    assert len(list(machine.check_ports("127.0.0.1", {"http": 0, "metrics": 0}))) == 2


def test_an_unknown_host_is_red():
    found = only(machine.check_ports("no.such.host.invalid", {"http": 8000}))
    assert found.level is RED and found.says.startswith("--host no.such.host.invalid")


def test_the_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert only(machine.check_driver(tmp_path)).level is GREEN
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"bin/{name}")
    assert only(machine.check_driver(tmp_path)).level is YELLOW
    write(tmp_path, dev__nvidiactl="")
    assert only(machine.check_driver(tmp_path)).level is YELLOW
    write(tmp_path, proc__driver__nvidia__version="NVRM version: NVIDIA UNIX x86_64  580.95.05  Tue\n")
    found = only(machine.check_driver(tmp_path))
    assert (found.level, found.says) == (GREEN, "580.95.05")


def test_a_check_that_lacks_a_package_or_fails_is_a_finding():
    def lacks() -> list[Finding]:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

        return []

    def breaks() -> list[Finding]:
        raise ImportError("libbroken.so: cannot open it")

    def fails() -> list[Finding]:
        raise ValueError("first line\nsecond")

    found = only(examine("a", lacks))
    assert (
        found.level is RED
        and found.says == "cannot be examined: the package no_such_package is not installed"
    )
    found = only(examine("broken", breaks))
    assert found.level is RED and found.says == "cannot be examined: libbroken.so: cannot open it"
    found = only(examine("b", fails))
    assert found.level is RED and found.says.endswith("ValueError: first line")


def test_the_status_is_the_worst_level_of_all_findings():
    of = {level: Finding("", level, "") for level in Level}
    assert worst([]) is GREEN and worst([of[GREEN], of[YELLOW]]) is YELLOW
    assert worst([of[RED], of[YELLOW], of[GREEN]]) is RED
