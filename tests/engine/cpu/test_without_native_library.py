"""A machine that cannot have the compiled code serves all the same, and says why."""

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


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is remembered of this machine's compiler, and nothing has been compiled before."""
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return "there is no C++ compiler"


def no_avx512(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset({"fpu", "avx2"}))
    return "the processor lacks avx512"


def no_flags(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(library, "_processor_flags", frozenset)
    return "the processor lacks avx512"


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    (folder / "c++").write_text("#!/bin/sh\necho 'an error of its own' >&2\nexit 1\n")
    (folder / "c++").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    # A processor that would do, whatever this one is.
    monkeypatch.setattr(
        library,
        "_processor_flags",
        lambda: library._NEEDED | library._INT8 | library._OF_DTYPE["bfloat16"],
    )
    return "an error of its own"


def nothing_that_can_be_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """It is compiled, but no folder and no memory lets it be run."""

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


LACKS = [nothing_that_can_be_loaded, no_compiler, no_avx512, no_flags, a_compiler_that_fails]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_machine_without_it_serves_and_says_why_once(
    zoo: Zoo,
    lack: object,
    dtype: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = zoo["llama"]
    if lack is no_compiler and library._NEEDED - library._processor_flags():
        pytest.skip("the processor comes first")
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


def test_who_asks_for_torch_is_told_and_not_warned(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "inflight.engine.load_decoder"):
        load_engine(zoo["llama"].folder, kernels="torch")
    said = [record for record in caplog.records if "operators" in record.getMessage()]
    assert [(record.levelname, record.getMessage()) for record in said] == [
        ("INFO", "the layers run on torch's operators: kernels is torch")
    ]


def test_who_asks_for_torch_and_int8_is_warned(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_engine(zoo["llama"].folder, kernels="torch", dtype="int8")
    (record,) = caplog.records
    assert record.getMessage().endswith("slower than int8 by compiled code: kernels is torch")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("dtype", "lacking", "reason"),
    [
        ("bfloat16", "avx512_bf16", "slower than compiled code: the processor lacks avx512_bf16"),
        ("int8", "avx512_bf16", "slower than int8 by compiled code: the processor lacks avx512_bf16"),
        ("int8", "avx512_vnni", "slower than int8 by compiled code: the processor lacks avx512_vnni"),
    ],
)
def test_a_processor_that_lacks_one_thing_is_said_once(
    zoo: Zoo,
    dtype: str,
    lacking: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sets = library.instruction_sets("bfloat16", int8=True)
    monkeypatch.setattr(library, "_processor_flags", lambda: sets - {lacking})
    with caplog.at_level(logging.WARNING):
        load_engine(zoo["llama"].folder, dtype=dtype)
    assert [record.getMessage().endswith(reason) for record in caplog.records] == [True]


def test_a_dtype_that_it_does_not_have_is_computed_by_torch(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load_engine(zoo["llama"].folder, dtype="float16")
    assert engine.dtype == "float16"
    assert ["not in float16" in record.getMessage() for record in caplog.records] == [True]


def test_a_processor_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_processor_flags", lambda: library._NEEDED)
    with pytest.raises(CannotBuild, match="the processor lacks avx512_bf16"):
        load_library("bfloat16")
    with pytest.raises(CannotBuild, match="not in float16"):
        load_library("float16")
