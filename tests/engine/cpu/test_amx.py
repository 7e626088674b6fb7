"""Products by AMX, with a stand-in for its instructions (source/amx.h).

These tests have not been run on a processor with AMX. Whole models, for which the library is compiled with the
stand-in, are in the exhaustive tier.
"""

from __future__ import annotations

import platform
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.engine.cpu import library
from inflight.engine.cpu.library import CannotBuild, find_target, load_library
from inflight.engine.engine import ModelEngine
from inflight.testing.make_model import Shape, make_model
from tests.engine.cpu.programs import compile_program, exit_status
from tests.engine.driver import Driver, Row, load_engine
from tests.engine.kernels import needs_native

pytestmark = needs_native

AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"})
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
STAND_IN = ("-DINFLIGHT_AMX", "-DINFLIGHT_AMX_STAND_IN=1")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> library.Target:
    """A target with AMX's products, on this machine's lanes."""
    own = find_target("bfloat16", int8=True)
    target = replace(
        own, name="amx", here=(*own.here, *STAND_IN), dtypes=frozenset({"bfloat16"}), caveat="a stand-in"
    )
    monkeypatch.setattr(library, "TARGETS", (target, own))
    monkeypatch.setattr(library, "_PREBUILT", Path("/nothing"))
    monkeypatch.delenv("INFLIGHT_CPU_TARGET", raising=False)
    return target


PROGRAM = """
#include <initializer_list>
static int fault = 1;
#include "amx_check.h"
using namespace inflight;
using T = TileInstructions;
uint16_t bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  return word >> 16;
}
float total(float first, std::initializer_list<float> rows, std::initializer_list<float> columns) {
  uint16_t a[32] = {}, b[16][32] = {};
  int i = 0;
  for (float x : rows) a[i++] = bfloat16(x);
  i = 0;
  for (float x : columns) b[i / 2][6 + i % 2] = bfloat16(x), ++i;  // the column 3
  float sums[16] = {0, 0, 0, first};
  TileConfig config;
  config.set(0, 1), config.set(4, 1), config.set(6, 16);
  T::configure(config);
  T::load<0>(sums, 64), T::load<4>(a, 64), T::load<6>(b, 64);
  T::multiply_bfloat16<0, 4, 6>();
  T::store<0>(sums, 64);
  for (int n = 0; n < 16; ++n)
    if (n != 3 && sums[n] != 0) return 1e9f;
  T::release();
  return sums[3];
}
int sum_pairs() {
  const float big = 0x1p24f, small = 0x1p-100f, least = 0x1p-126f;
  // First and second numbers of pairs are summed up apart: one after the other, big would swallow the ones.
  if (total(0, {big, 1, -big, 1}, {1, 1, 1, 1}) != 2) return 1;
  // What there was comes last: before the others, it would swallow them.
  if (total(-big, {big, 1}, {1, 1}) != 0 || total(big, {1, 1}, {1, 1}) != big + 2) return 2;
  // Products are exact: 129^2 - 128^2 is 257, which 129^2 rounded to bfloat16 would not give.
  if (total(0, {129, 0, -128, 0}, {129, 0, 128, 0}) != 257) return 3;
  // Numbers below the smallest normal one are zero, of operands, sums and results.
  if (total(least / 2, {0}, {0}) != 0 || total(0, {least / 2}, {0x1p20f}) != 0) return 4;
  if (total(0, {small}, {small}) != 0 || total(0, {least}, {1}) != least) return 5;
  return 0;
}
int main(int count, char** arguments) {
  if (count == 1) return sum_pairs();
  fault = std::atoi(arguments[1]);
  return check_tiles<Bf16>();
}
"""
"""Without an argument it sums up pairs; with a number it tries products with that fault of the stand-in."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-DINFLIGHT_AMX", "-DINFLIGHT_AMX_STAND_IN=fault")
    return compile_program(tmp_path_factory.mktemp("amx"), PROGRAM, *flags)


@pytest.mark.parametrize(("fault", "found"), [(1, 0), (2, 2), (3, 3)], ids=["none", "a sum", "a crash"])
def test_products_are_tried_before_they_are_used(program: Path, fault: int, found: int) -> None:
    assert exit_status(program, str(fault)) == found


def test_the_amx_stand_in_adds_products_as_the_manual_says(program: Path) -> None:
    assert exit_status(program) == 0


INTRINSICS = {
    "load<7>(rows, stride)": "_tile_loadd(7, rows, stride)",
    "store<3>(rows, stride)": "_tile_stored(3, rows, stride)",
    "zero<2>()": "_tile_zero(2)",
    "release()": "_tile_release()",
    "multiply_bfloat16<1, 4, 7>()": "_tile_dpbf16ps(1, 4, 7)",
    "multiply_bytes<2, 5, 6>()": "_tile_dpbusd(2, 5, 6)",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's instructions")
def test_instructions_are_those_of_the_intrinsics(tmp_path: Path) -> None:
    """Assembled for a processor with AMX, but not run."""
    target = next(target for target in library.TARGETS if target.name == "amx")

    def assemble(calls: Iterable[str]) -> list[str]:
        functions = [
            f"void f{number}(void* rows, long stride) {{ {call}; }}" for number, call in enumerate(calls)
        ]
        head = '#include <immintrin.h>\n#include "products.h"\n'
        (tmp_path / "source.cpp").write_text("\n".join((head, *functions)))
        flags = (*target.flags_anywhere("bfloat16", int8=True), "-std=c++17", "-O2", "-I", library._SOURCES)
        command = [library._find_compiler(), *flags, "-c", "source.cpp", "-o", "object.o"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
        command = ["objdump", "-d", "--no-show-raw-insn", "object.o"]
        listing = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        return [
            line.split(maxsplit=1)[1] for line in listing.splitlines() if re.search(r"\b(tile|tdp)", line)
        ]

    ours = [f"inflight::TileInstructions::{call}" for call in INTRINSICS]
    found = assemble([*ours, *INTRINSICS.values()])
    assert len(found) == 2 * len(ours) and found[: len(ours)] == found[len(ours) :]


@pytest.fixture(params=["llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose matrices' numbers of inputs are no multiples of a tile's."""
    shape = Shape(2, 72, 4, 2, 100, 512, 256, 10_000.0)
    return make_model(tmp_path / "model", request.param, shape, standard_deviation=0.2)


def engines(
    folder: Path, stand_in: library.Target, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> Iterator[ModelEngine]:
    """Yield one engine with the stand-in, and one with this machine's own target."""
    for name in ("amx", library.TARGETS[1].name):
        monkeypatch.setenv("INFLIGHT_CPU_TARGET", name)
        yield load_engine(folder, kernels="native", max_num_sequences=40, **changes)


def draw(lengths: list[int]) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(5, 250) for _ in range(length)] for length in lengths]


def run_all(engine: ModelEngine, prompts: list[list[int]], steps: int) -> list[Row]:
    """Run all prompts together, whole contexts first; return the rows."""
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({row: len(row.tokens) for row in rows})
    for _ in range(steps):
        driver.step(generation=rows)
    return rows


@pytest.mark.exhaustive
def test_results_of_a_row_do_not_depend_on_the_others(
    model: Path, stand_in: library.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches have one row, less than a tile, several tiles, and contexts whole and in chunks."""
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "amx")
    engine = load_engine(model, kernels="native", max_num_sequences=40)
    prompts = draw([7, 50, 3, *[2] * 34])
    together = run_all(engine, prompts, 3)
    for row in together[:4]:
        driver = Driver(load_engine(model, kernels="native", max_num_sequences=40))
        alone = driver.start(row.tokens[: row.prompt_length])
        driver.generate(alone, 4, chunk=17)
        assert alone.generated == row.generated
        assert all(torch.equal(a, b) for a, b in zip(alone.logits, row.logits, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama"], indirect=True)  # routers compute in bfloat16
def test_int8_is_bitwise_equal_with_and_without_tiles(
    model: Path, stand_in: library.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = draw([37, 5])
    tiled, plain = (run_all(each, prompts, 3) for each in engines(model, stand_in, monkeypatch, dtype="int8"))
    for own, other in zip(tiled, plain, strict=True):
        assert own.generated == other.generated
        assert all(torch.equal(a, b) for a, b in zip(own.logits, other.logits, strict=True))


@pytest.mark.exhaustive
def test_bfloat16_is_nearly_equal_with_and_without_tiles(
    model: Path, stand_in: library.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, plain = (run_all(each, draw([37, 5]), 0) for each in engines(model, stand_in, monkeypatch))
    for own, other in zip(tiled, plain, strict=True):
        difference = (own.logits[0] - other.logits[0]).abs().max()
        assert 0 < difference < 0.05 * other.logits[0].abs().max()


@pytest.mark.parametrize(("check", "reason"), list(library._WRONG_PRODUCTS.items()))
def test_a_target_whose_products_are_wrong_is_left_out(
    stand_in: library.Target,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    check: int,
    reason: str,
) -> None:
    load: Callable[..., library.CompiledCode] = library._load

    def load_wrong(target: library.Target, *arguments: object) -> library.CompiledCode:
        found = load(replace(stand_in, here=library.TARGETS[1].here), *arguments)
        if target is not stand_in:
            return load(target, *arguments)
        monkeypatch.setattr(found, "check_products", lambda: check)
        return found

    monkeypatch.setattr(library, "_load", load_wrong)
    found = load_library("bfloat16", int8=True)
    assert found.description == f"{library.TARGETS[1].name}: amx is left out, as {reason}"
    assert f"compiled layers: amx is left out, as {reason}" in caplog.messages
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "amx")
    with pytest.raises(CannotBuild, match=f"^amx is left out, as {reason}$"):
        load_library("bfloat16", int8=True)


def test_the_processors_flags_choose_the_amx_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CPU_TARGET", raising=False)
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX512 | AMX)
    assert (find_target("bfloat16").name, find_target("bfloat16", True).name) == ("amx", "amx")
    assert find_target("float32").name == library.describe_target("float32") == "avx512"
    assert library.describe_target("bfloat16") == "amx, not yet run on hardware by this project"
    monkeypatch.setattr(library, "_processor_flags", lambda: (AVX512 | AMX) - {"amx_int8"})
    assert find_target("bfloat16", True).name == library.describe_target("bfloat16", True) == "avx512"
    monkeypatch.setattr(library, "_processor_flags", lambda: AVX512 | AMX)
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "amx")
    with pytest.raises(CannotBuild, match="INFLIGHT_CPU_TARGET is amx, which does not compute in float32"):
        find_target("float32")
