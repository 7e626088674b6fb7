"""The kernels in Triton's language, on a CPU: whether they are interpreted is settled when they are imported.

So their tests, in the folder `interpreted`, run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("capability", "shared_kib", "dtype"),
    [(80, 163, "bf16"), (90, 227, "bf16"), (90, 227, "fp32"), (120, 99, "bf16")],
)
def test_they_compile_for_a_gpu(capability: int, shared_kib: int, dtype: str) -> None:
    """To machine code, which Triton does without one; and a processor's shared memory is enough."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inflight.engine.torch.kernels import attention as kernels

    pointers = dict.fromkeys(("queries", "keys", "values", "results", "sinks"), f"*{dtype}")
    pointers |= dict.fromkeys(("tables", "rows", "slots", "positions", "tiles"), "*i64")
    pointers |= dict.fromkeys(("parts_read", "parts_best", "parts_total"), "*fp32")
    constants = {
        "RECENT": 4096,
        "SINKS": 4,
        "HAS_SINKS": True,
        "SOFT_CAP": 30.0,
        "TOKENS_PER_BLOCK": 32,
        "GROUP": 4,
    }
    constants |= {"HEAD_DIM": 128, "WIDTH": 128, "NUM_PARTS": 32, "LEAST_PART": 256, "TILE": 64}
    for name, rows in (("_attend_generation", 16), ("_add_up", 16), ("_attend_chunk", 64)):
        kernel = getattr(kernels, name)
        given = {key: value for key, value in (constants | {"ROWS": rows}).items() if key in kernel.arg_names}
        types = {"scale": "fp32"} | pointers | dict.fromkeys(given, "constexpr")
        signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=given)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"] and compiled.metadata.shared <= shared_kib << 10
