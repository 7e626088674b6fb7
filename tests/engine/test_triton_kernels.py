"""The kernels in Triton's language, on a CPU: whether they are interpreted is settled when they are imported.

So their tests, in the folder `interpreted`, run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine.torch.attention_check import CannotAttend, check_attention
from inflight.engine.torch.cuda import triton_attention
from inflight.models import read_model_description
from tests.models.zoo import Zoo

FOLDER = Path(__file__).with_name("interpreted")


def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "python_files=check_*.py"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout[-500:]


def test_without_a_gpu_they_cannot_be_used(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    with pytest.raises(CannotAttend):
        check_attention(triton_attention(decoder), decoder, 16, (None,), torch.float32, torch.device("cpu"))


def test_without_the_package(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotAttend, match="triton is not installed"):
        triton_attention(decoder)


TARGETS = pytest.mark.parametrize(
    ("capability", "shared_kib", "dtype"),
    [(80, 163, "bf16"), (90, 227, "bf16"), (90, 227, "fp32"), (120, 99, "bf16")],
)


STORED = ("", "*i8", "*u8")
"""Types of keys and values in the cache, by `LEVELS` of the kernels."""


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """To machine code, which Triton does without a GPU; other arguments are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {key: value for key, value in constants.items() if key in kernel.arg_names}
    known = types | dict.fromkeys(given, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@TARGETS
def test_attention_compiles_for_a_gpu(capability: int, shared_kib: int, dtype: str) -> None:
    """A processor's shared memory is enough."""
    from inflight.engine.torch.kernels import attention as kernels

    types = {"scale": "fp32"} | dict.fromkeys(("queries", "keys", "values", "results", "sinks"), f"*{dtype}")
    types |= dict.fromkeys(("tables", "rows", "slots", "positions", "tiles"), "*i64")
    types |= dict.fromkeys(("parts_read", "parts_best", "parts_total", "key_scales", "value_scales"), "*fp32")
    constants = {
        "RECENT": 4096,
        "SINKS": 4,
        "HAS_SINKS": True,
        "SOFT_CAP": 30.0,
        "TOKENS_PER_BLOCK": 32,
        "GROUP": 4,
    }
    constants |= {"HEAD_DIM": 128, "WIDTH": 128, "NUM_PARTS": 32, "LEAST_PART": 256, "TILE": 64}
    wanted = [("_attend_generation", 16, 0), ("_add_up", 16, 0), ("_attend_chunk", 64, 0)]
    if dtype == "bf16":
        wanted += [("_attend_generation", 16, 1), ("_attend_chunk", 64, 2)]
    for name, rows, levels in wanted:
        chosen = constants | {"ROWS": rows, "LEVELS": levels}
        of_cache = dict.fromkeys(("keys", "values"), STORED[levels] or f"*{dtype}")
        made = compiled(getattr(kernels, name), capability, types | of_cache, chosen)
        assert made.asm["cubin"] and made.metadata.shared <= shared_kib << 10


@TARGETS
def test_operations_of_layers_compile_for_a_gpu(capability: int, shared_kib: int, dtype: str) -> None:
    from inflight.engine.torch.kernels import layers, peaks, quantize

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
        assert made.asm["cubin"] and made.metadata.shared <= shared_kib << 10
    for levels in (1, 2):
        of_cache = types | dict.fromkeys(("key_cache", "value_cache"), STORED[levels])
        chosen = constants | {"LEVELS": levels}
        assert compiled(layers._rotate_and_write, capability, of_cache, chosen).asm["cubin"]
    rounding = {"LARGEST": 448.0, "LEAST": 1e-30, "BLOCK": 4096}
    if capability >= 89:  # which have float8
        pointers = {"x": f"*{dtype}", "levels": "*fp8e4nv", "scales": "*fp32"}
        assert compiled(quantize._quantize_rows, capability, pointers, rounding).asm["cubin"]
    for activation in layers.ACTIVATIONS.values():
        chosen = {"ACTIVATION": activation, "BLOCK": 1024}
        assert compiled(layers._gated_activation, capability, types, chosen).asm["cubin"]
