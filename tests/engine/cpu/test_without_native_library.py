"""A machine that cannot have the compiled code serves without it, and logs the reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from inflight.engine.cpu import library
from inflight.engine.cpu.library import CannotBuild, load_library
from inflight.errors import ConfigError
from tests.engine.driver import alone, load_engine
from tests.models.zoo import Zoo

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"})


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clear everything that is cached about this machine's compiler and compiled code."""
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return "there is no C++ compiler"


def another_target(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Select a target whose instruction sets the processor lacks; return the reason."""
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX2)
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "avx512")
    return ", which INFLIGHT_CPU_TARGET=avx512 needs"


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    (folder / "c++").write_text("#!/bin/sh\necho 'an error of its own' >&2\nexit 1\n")
    (folder / "c++").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    # Simulate a processor for which code could be compiled.
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX2)
    return "an error of its own"


def nothing_that_can_be_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Let compiling succeed, but prevent loading from folders and from memory; return the logged reason."""

    def refuse(name: str) -> None:
        raise OSError(f"{name}: failed to map segment from shared object")

    a_compiler_that_fails(monkeypatch, folder)
    lines = (
        "#!/bin/sh",
        '[ "$1" = --version ] && exec echo 1',
        "for target; do :; done",
        'echo library > "$target"',
    )
    (folder / "c++").write_text("\n".join((*lines, "")))
    monkeypatch.setattr(library.ctypes, "CDLL", refuse)
    return "cannot be kept or loaded: "


LACKS = [
    nothing_that_can_be_loaded,
    no_compiler,
    another_target,
    a_compiler_that_fails,
]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_machine_without_compiled_code_serves_and_logs_the_reason_once(
    zoo: Zoo,
    lack: object,
    dtype: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = zoo["llama"]
    reason = lack(monkeypatch, tmp_path)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        engine = load_engine(model.folder, dtype=dtype)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    row = alone(engine, model.prompt(9), 4)
    if dtype is None:
        assert row.generated == model.greedy(model.prompt(9), 4)
    with pytest.raises(ConfigError, match="kernels is native, but there is no compiled code: ") as error:
        load_engine(model.folder, dtype=dtype, kernels="native")
    assert reason in str(error.value)


def test_asking_for_torch_is_logged_as_info(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "inflight.engine.load_decoder"):
        load_engine(zoo["llama"].folder, kernels="torch")
    said = [record for record in caplog.records if "operators" in record.getMessage()]
    assert [(record.levelname, record.getMessage()) for record in said] == [
        ("INFO", "the layers run on torch's operators: kernels is torch")
    ]


def test_asking_for_torch_and_int8_is_logged_as_a_warning(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_engine(zoo["llama"].folder, kernels="torch", dtype="int8")
    (record,) = caplog.records
    assert record.getMessage().endswith("slower than int8 by compiled code: kernels is torch")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("dtype", "lacking", "reason"),
    [
        (
            "bfloat16",
            "f16c",
            "slower than compiled code: the processor lacks f16c, which INFLIGHT_CPU_TARGET=avx2 needs",
        ),
        (
            "int8",
            "fma",
            "slower than int8 by compiled code: the processor lacks fma, which INFLIGHT_CPU_TARGET=avx2 needs",
        ),
    ],
)
def test_a_missing_instruction_set_is_logged_once(
    zoo: Zoo,
    dtype: str,
    lacking: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "avx2")
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX2 - {lacking})
    with caplog.at_level(logging.WARNING):
        load_engine(zoo["llama"].folder, dtype=dtype)
    assert [record.getMessage().endswith(reason) for record in caplog.records] == [True]


def test_a_dtype_without_compiled_code_is_computed_by_torch(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load_engine(zoo["llama"].folder, dtype="float16")
    assert engine.dtype == "float16"
    assert ["not in float16" in record.getMessage() for record in caplog.records] == [True]


def test_a_target_that_this_machine_does_not_have_is_an_error(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "neon")
    expected = "INFLIGHT_CPU_TARGET is 'neon', expected amx or avx512 or avx2 or generic"
    with pytest.raises(ConfigError, match=expected):
        load_engine(zoo["llama"].folder, dtype="bfloat16")


def test_an_error_names_a_missing_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "avx2")
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX2 - {"f16c"})
    with pytest.raises(CannotBuild, match="the processor lacks f16c, which INFLIGHT_CPU_TARGET=avx2 needs"):
        load_library("bfloat16")
    with pytest.raises(CannotBuild, match="not in float16"):
        load_library("float16")


@pytest.mark.parametrize(
    ("lacking", "dtype", "int8", "target", "words"),
    [
        ((), "bfloat16", True, "avx512", "avx512"),
        (("avx512_bf16",), "bfloat16", False, "avx2", "avx2: the processor lacks avx512_bf16"),
        (("avx512_bf16",), "float32", False, "avx512", "avx512"),
        (("avx512_vnni",), "bfloat16", True, "avx2", "avx2: the processor lacks avx512_vnni"),
        (("avx512_vnni",), "bfloat16", False, "avx512", "avx512"),
        (("avx512vl", "avx512dq"), "float32", False, "avx2", "avx2: the processor lacks avx512dq, avx512vl"),
        (("avx512f", "f16c", "fma"), "float32", False, "generic", "generic: the processor lacks f16c, fma"),
        (AVX512 | AVX2, "bfloat16", True, "generic", "generic: the processor lacks avx2, f16c, fma"),
    ],
)
def test_the_fastest_code_that_the_processor_can_run_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    lacking: tuple[str, ...],
    dtype: str,
    int8: bool,
    target: str,
    words: str,
) -> None:
    monkeypatch.delenv("INFLIGHT_CPU_TARGET", raising=False)
    monkeypatch.setattr(library, "_processor_flags", lambda: (AVX512 | AVX2) - set(lacking))
    assert library.find_target(dtype, int8).name == target
    assert library.describe_target(dtype, int8) == words
    for name in {"generic", target} - {"avx512"}:
        monkeypatch.setenv("INFLIGHT_CPU_TARGET", name)
        assert library.find_target(dtype, int8).name == library.describe_target(dtype, int8) == name


ARM = {"asimd": "neon", "asimd asimddp atomics": "neon-dot", "asimd asimddp atomics bf16 i8mm": "neon-bf16"}


@pytest.mark.parametrize("features", ARM)
def test_on_arm_the_fastest_code_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: fp {features}\nCPU part\t: 0xd0c\n")
    monkeypatch.setattr(library, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(library, "TARGETS", (*library._OF_MACHINES["aarch64"], library._GENERIC))
    monkeypatch.delenv("INFLIGHT_CPU_TARGET", raising=False)
    assert {library.find_target(*kind).name for kind in (("float32", False), ("bfloat16", True))} == {
        ARM[features]
    }
    assert library._processor_flags() == {"fp", *features.split()}
