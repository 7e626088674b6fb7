"""The kernels in Triton's language, on a CPU.

Whether they are interpreted is determined when they are imported, so the tests in the folder `interpreted`
run in their own process.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.find import triton_attention
from inflight.models import read_model_description
from tests.models.zoo import Zoo
from tests.own_process import run_checks
from tests.tiers import with_all

FOLDER = Path(__file__).with_name("interpreted")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.exhaustive
def test_all_checks_pass_in_tritons_interpreter() -> None:
    run_checks(FOLDER, timeout_s=3000, TRITON_INTERPRET="1")


def test_kernels_cannot_be_used_without_a_gpu(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    with pytest.raises(CannotAttend):
        check_attention(triton_attention(decoder), decoder, 16, (None,), torch.float32, torch.device("cpu"))


def test_kernels_are_imported_only_where_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports the engine a second time, with modules of its own, which are forgotten afterwards."""
    import inflight.engine.runner as first

    for name in list(sys.modules):
        if name.partition(".")[0] in ("inflight", "triton"):
            monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module(first.__name__) is not first
    assert "triton" not in sys.modules


def test_attention_without_the_triton_package_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotAttend, match="triton is not installed"):
        triton_attention(decoder)


def test_no_batch_waits_for_a_compiler_for_its_number_of_rows() -> None:
    """No argument is specialized for the number of rows, or for an address that depends on it."""
    from inflight.engine.cuda.kernels import attention, layers, product, short_convolution
    from inflight.engine.cuda.kernels.launching import PER_BATCH

    kernels = (attention._attend_generation, attention._add_up, attention._attend_chunk)
    for kernel in (*kernels, layers._rotate_and_write, product._multiply_levels, product._add_parts):
        for parameter in kernel.params:
            if parameter.name == "num_rows":
                assert parameter.do_not_specialize
            elif parameter.name in PER_BATCH:
                assert parameter.do_not_specialize_on_alignment, f"{parameter.name} of {kernel.__name__}"
    parameters = {each.name: each for each in short_convolution._convolve.params}
    assert parameters["num_tokens"].do_not_specialize and parameters["sequence_stride"].do_not_specialize
    assert parameters["inputs"].do_not_specialize_on_alignment


TARGETS = pytest.mark.parametrize(
    ("capability", "shared_kib", "dtype"),
    with_all(
        [(80, 163, "bf16"), (90, 227, "bf16"), (90, 227, "fp32"), (120, 99, "bf16"), (120, 99, "fp32")],
        [(90, 227, "bf16")],
    ),
)
MAX_SPILLED = 600
"""Spilled bytes per thread; a tile that is too large spills thousands."""


STORED = ("", "*i8", "*u8")
"""Types of keys and values in the cache, by `LEVELS` of the kernels."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of a kernel.

    Attributes:
        shared: Bytes of shared memory per program.
        spilled: Bytes of registers spilled to memory per thread.
        ptx: The code before it was assembled.
    """

    shared: int
    spilled: int
    ptx: str


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compile to machine code, which Triton can do without a GPU; other arguments are int32.

    As in a launch with tensors, addresses and row sizes are multiples of 16, which permits asynchronous loads.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inflight.engine.cuda.kernels.launching import PER_BATCH

    given = {key: value for key, value in constants.items() if key in kernel.arg_names}
    known = types | dict.fromkeys(given, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, kind) in enumerate(signature.items())
        if (kind[0] == "*" or kind == "i32") and argument not in (*PER_BATCH, "num_rows")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack, local = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage.stdout)[0]
    return Compiled(made.metadata.shared, int(stack) + int(local), made.asm["ptx"])


@TARGETS
@pytest.mark.parametrize(
    ("head_dim", "has_all"), with_all([(64, False), (128, False), (128, True)], [(128, True)])
)
def test_attention_compiles_for_a_gpu(
    capability: int, shared_kib: int, dtype: str, head_dim: int, has_all: bool
) -> None:
    """A processor's shared memory and registers suffice, and keys and values are loaded ahead."""
    from inflight.engine.cuda.kernels import attention as kernels

    types = {"scale": "fp32"} | dict.fromkeys(("queries", "keys", "values", "results", "sinks"), f"*{dtype}")
    types |= dict.fromkeys(("tables", "rows", "slots", "positions", "tiles"), "*i64")
    floats = ("parts_read", "parts_best", "parts_total", "key_scales", "value_scales")
    types |= dict.fromkeys(floats, "*fp32")
    constants = {"RECENT": 4096, "SINKS": 4, "HAS_SINKS": True, "SOFT_CAP": 30.0}
    if not has_all:
        constants = {"RECENT": 0, "SINKS": 0, "HAS_SINKS": False, "SOFT_CAP": 0.0}
    constants |= {"HEAD_DIM": head_dim, "WIDTH": head_dim, "NUM_PARTS": 32, "MIN_PART": 256}
    wanted = [("_attend_generation", 16, 0), ("_attend_chunk", 64, 0)]
    if dtype == "bf16":
        wanted += [("_attend_generation", 16, 1), ("_attend_chunk", 64, 2)]
    for name, rows, levels in wanted:
        tile, num_warps, num_stages = (
            kernels.chunk_tiling(head_dim, DTYPES[dtype])
            if name == "_attend_chunk"
            else (*kernels._tiling(rows, head_dim, DTYPES[dtype]), 3)
        )
        sizes = {"TOKENS_PER_BLOCK": 32, "GROUP": 4, "ROWS": rows, "TILE": tile, "LEVELS": levels}
        of_cache = dict.fromkeys(("keys", "values"), STORED[levels] or f"*{dtype}")
        given = types | of_cache, constants | sizes
        made = compiled(getattr(kernels, name), capability, *given, num_warps, num_stages)
        assert made.shared <= shared_kib << 10 and made.spilled <= MAX_SPILLED
        assert "cp.async" in made.ptx
    made = compiled(
        kernels._add_up, capability, types, constants | {"TILE": 64, "AT_ONCE": kernels.PARTS_AT_ONCE}
    )
    assert made.shared <= shared_kib << 10 and made.spilled <= 64


@TARGETS
def test_operations_of_layers_compile_for_a_gpu(capability: int, shared_kib: int, dtype: str) -> None:
    from inflight.engine.cuda.kernels import layers, peaks, quantize

    scales = ("key_scales", "value_scales")
    names = ("x", "computed", "weight", "sums", "normed", "qkv", "turned", "query_weight", "key_weight")
    types = dict.fromkeys((*names, "key_cache", "value_cache", "inner", "results"), f"*{dtype}")
    types |= dict.fromkeys(("cosines", "sines", "logits", "highest", "block_highest", *scales), "*fp32")
    types |= dict.fromkeys(("positions", "places", "tokens", "block_tokens"), "*i64") | {"eps": "fp32"}
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "WIDTH": 128,
        "ROTARY_DIM": 96,
        "HAS_NORMS": True,
        "LEVELS": 0,
    }
    constants |= {"BLOCK": 4096, "BLOCKS": 32}
    for kernel in (
        layers._add_norm, layers._rotate_and_write, peaks._peaks_of_blocks, peaks._peaks_of_rows,
    ):  # fmt: skip
        made = compiled(kernel, capability, types, constants)
        assert made.shared <= shared_kib << 10 and made.spilled <= 64
    for levels in (1, 2):
        of_cache = types | dict.fromkeys(("key_cache", "value_cache"), STORED[levels])
        made = compiled(layers._rotate_and_write, capability, of_cache, constants | {"LEVELS": levels})
        assert made.spilled <= 64
    rounding = {"OF_LARGEST": 1 / 448, "MIN_SCALE": 1e-30, "BLOCK": 4096}
    if capability >= 89:  # which have float8
        pointers = {"x": f"*{dtype}", "levels": "*fp8e4nv", "scales": "*fp32"}
        made = compiled(quantize._quantize_rows, capability, pointers, rounding)
        assert made.spilled <= 64 and "div.rn" in made.ptx and "div.full" not in made.ptx
    for activation in layers.ACTIVATIONS.values():
        chosen = {"ACTIVATION": activation, "BLOCK": 1024}
        assert compiled(layers._gated_activation, capability, types, chosen).spilled <= 64


@TARGETS
@pytest.mark.parametrize("has_beta", [True, False])
def test_linear_attention_compiles_for_a_gpu(
    capability: int, shared_kib: int, dtype: str, has_beta: bool
) -> None:
    from inflight.engine.cuda.kernels import linear_attention as kernels

    names = ("queries", "keys", "values", "log_decay", "beta", "states", "outputs", "new_states")
    constants = {"HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "KEYS": 128, "VALUES": 32}
    constants |= {"PIECE": kernels.PIECE, "HAS_BETA": has_beta, "BY_DIMENSION": False}
    types = dict.fromkeys(names, "*fp32")
    made = compiled(kernels._step, capability, types, constants)
    assert made.shared <= shared_kib << 10 and made.spilled <= 64
    made = compiled(kernels._scan, capability, types, constants)
    assert made.shared <= shared_kib << 10 and made.spilled <= 5 * MAX_SPILLED


@TARGETS
@pytest.mark.parametrize("tokens", [1, 16])
def test_short_convolutions_compile_for_a_gpu(
    capability: int, shared_kib: int, dtype: str, tokens: int
) -> None:
    from inflight.engine.cuda.kernels import short_convolution as kernels

    types = dict.fromkeys(("inputs", "states", "outputs", "new_states"), f"*{dtype}")
    types |= dict.fromkeys(("weights", "bias"), "*fp32")
    constants = {"WIDTH": 4, "TOKENS": tokens, "COLUMNS": 128, "KEPT": 4, "HAS_BIAS": True}
    made = compiled(kernels._convolve, capability, types, constants)
    assert made.shared <= shared_kib << 10 and made.spilled <= 64


@TARGETS
@pytest.mark.parametrize(
    "kind", with_all(["int4", "int8", "uint8-zeros", "float8", "float4"], ["int4", "float8"])
)
def test_products_with_levels_compile_for_a_gpu(
    capability: int, shared_kib: int, dtype: str, kind: str
) -> None:
    from inflight.engine.cuda.kernels import grouped

    types = {"x": f"*{dtype}", "results": f"*{dtype}", "scales": "*fp32", "zeros": "*u8"}
    types["values"] = "*i8" if kind == "int8" else "*u8"
    is_float4 = kind == "float4"
    if is_float4:
        types["scales"] = "*u8"
    has = {"FOUR_BITS": kind in ("int4", "float4"), "FLOAT4": is_float4, "FLOAT8": kind == "float8"}
    has["HAS_ZEROS"] = not kind.startswith("float")
    for rows, outputs in ((16, 32), (64, 64)):
        constants = has | {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": 32 if is_float4 else 64}
        made = compiled(grouped._multiply, capability, types, constants)
        assert made.shared <= shared_kib << 10 and (made.spilled <= 64 or dtype == "fp32")


@pytest.mark.parametrize(
    ("capability", "shared_kib"), with_all([(80, 163), (90, 227), (120, 99)], [(90, 227)])
)
@pytest.mark.parametrize("num_outputs", with_all([4096, 28_672], [4096]))
@pytest.mark.parametrize("num_rows", with_all([1, 17, 33, 65, 129], [1, 129]))
@pytest.mark.parametrize("kind", with_all(["int8", "float8"], ["int8"]))
def test_products_with_8_bits_compile_for_a_gpu(
    capability: int, shared_kib: int, num_rows: int, num_outputs: int, kind: str
) -> None:
    """Levels are loaded ahead, and the processor's own product instructions multiply them."""
    from inflight.engine.cuda.kernels import product

    is_float8 = kind == "float8"
    if is_float8 and (capability < 89 or num_rows > product.FEW_ROWS):
        return  # the processor cannot multiply float8, or the kernel does not multiply this number of rows
    x, levels = ("*fp8e4nv", "*fp8e4nv") if is_float8 else ("*bf16", "*i8")
    tiling = (product.float8_tiling if is_float8 else product.int8_tiling)(num_rows, num_outputs)
    types = {"x": x, "levels": levels, "results": "*fp32" if tiling.is_shared else "*bf16"}
    types |= {"scales": "*fp32", "row_scales": "*fp32"}
    sizes = {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": tiling.inputs, "PARTS": tiling.parts}
    sizes |= {"IS_SHARED": tiling.is_shared, "HAS_ROW_SCALES": is_float8}
    steps = tiling.num_warps, tiling.num_stages
    made = compiled(product._multiply_levels, capability, types, sizes, *steps)
    # The widest tile spills a little, and was nevertheless the fastest one tried on an H100.
    most_spilled = 256 if kind == "int8" and num_rows > 128 else 64
    assert made.shared <= shared_kib << 10 and made.spilled <= most_spilled
    assert "cp.async" in made.ptx and ("mma.sync" in made.ptx or "wgmma" in made.ptx)
