"""A load never takes more memory than the converted weights and one tensor.

Measures the maximum of resident memory, mapped files included, of a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.models import read_model_description
from inflight.models.loader import num_parameters, tensor_shapes
from inflight.testing.make_model import Shape, make_model
from inflight.testing.quantize import quantize_checkpoint
from tests.engine.kernels import needs_native, why_no_native
from tests.tiers import with_all

_ROOT = Path(__file__).parents[2]
_SLACK = 12 << 20
"""Bytes for norms, tables of positions, the parts that are quantized at a time, and partly used huge pages."""
_HIDDEN, _INNER, _VOCABULARY, _LAYERS = 768, 6144, 4000, 4
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": _INNER,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_local_experts": 24,
}
"""All matrices of a layer's experts together take 54 MiB in bfloat16; each of them at most 1.5 MiB."""
_GPT_OSS = Shape(2, _HIDDEN, 8, 8, 512, _VOCABULARY, 2048, 10_000.0, experts=24)
_EMBEDDING = _VOCABULARY * _HIDDEN
_LARGEST = {False: 2 * _INNER * _HIDDEN, True: _EMBEDDING}
"""Number of values in the largest tensor, without and with experts; gate and up are one tensor in memory."""

CASES = [
    # stored dtype (experts: in bfloat16), loaded dtype, kernels, tensor-parallel ranks, bytes per weight
    ("float32", "float32", "torch", 1, 4),
    ("float32", "bfloat16", "torch", 1, 2),
    ("bfloat16", "int8", "torch", 1, 1),
    ("float32", "float32", "torch", 2, 4),
    ("float32", "float32", "native", 1, 4),
    ("bfloat16", "bfloat16", "native", 1, 2),
    ("float32", "bfloat16", "native", 1, 2),
    ("bfloat16", "int8", "native", 1, 1),
    ("bfloat16", "bfloat16", "native", 2, 2),
    ("experts", "bfloat16", "torch", 1, 2),
    ("experts", "bfloat16", "native", 1, 2),
    ("experts", "int8", "torch", 1, 1),
    ("experts", "int8", "native", 1, 1),
]
_FOUR_BITS = [
    # stored format, loaded dtype, kernels, tensor-parallel ranks
    ("gptq", None, "native", 1),
    ("gptq", None, "torch", 1),
    ("mxfp4", None, "native", 1),
    ("mxfp4", None, "torch", 1),
]


def _write(folder: Path, dtype: torch.dtype, **changed: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_LLAMA, **changed}))
    shapes = tensor_shapes(read_model_description(folder))
    tensors = {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Any, ...], dict[str, int]]:
    """Maximum (`peak`) and final (`kept`) resident bytes, and the number of parameters, by case.

    For the selected cases, all in one process.
    """
    selected: set[Any] = {
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    }
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    small = _write(folder / "small", torch.float32, **sizes)
    wanted = {case[0] for case in selected}
    plain = {"float32", "bfloat16"} & (wanted | {"bfloat16"})  # 4-bit formats are made from bfloat16
    stored = {name: _write(folder / name, getattr(torch, name)) for name in plain}
    if "experts" in wanted:
        stored["experts"] = _write(folder / "experts", torch.bfloat16, **_MIXTRAL)
    if "gptq" in wanted:
        stored["gptq"] = quantize_checkpoint(stored["bfloat16"], folder / "gptq", "gptq")
    if "mxfp4" in wanted:
        stored["mxfp4"] = make_model(folder / "mxfp4", "gpt_oss", _GPT_OSS, quantize="mxfp4")
    cases = [case for case in selected if case[2] != "native" or not why_no_native()]
    arguments = [(str(small), str(stored[case[0]]), *case[1:4]) for case in cases]
    program = [sys.executable, "-m", "tests.engine.load_memory_program", json.dumps(arguments)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, cwd=_ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    for each in stored.values():
        (each / "model.safetensors").unlink()
    found = dict(zip(cases, json.loads(done.stdout), strict=True))
    for case, each in found.items():
        each["weights"], _ = num_parameters(read_model_description(stored[case[0]]))
    return found


@pytest.mark.parametrize(
    "case",
    with_all(
        [pytest.param(case, marks=needs_native if case[2] == "native" else ()) for case in CASES],
        [
            ("bfloat16", "bfloat16", "native", 2, 2),
            ("experts", "int8", "native", 1, 1),
        ],
    ),
    ids=str,
)
def test_a_load_takes_the_weights_and_one_tensor_more(
    measured: dict[tuple[Any, ...], dict[str, int]], case: tuple[str, str, str, int, int]
) -> None:
    stored, _, _, tp_size, width = case
    found = measured[case]
    kept = (
        found["weights"] * width + (_EMBEDDING if width == 1 else 0)
    ) // tp_size  # embeddings stay bfloat16
    assert kept <= found["kept"] < kept + _SLACK, "what was measured are the weights"
    largest = _LARGEST[stored == "experts"] * (4 if stored == "float32" else 2)
    assert found["peak"] < kept + largest + _SLACK


@pytest.mark.parametrize(
    "case",
    with_all(
        [pytest.param(case, marks=needs_native if case[2] == "native" else ()) for case in _FOUR_BITS],
        [("gptq", None, "native", 1)],
    ),
    ids=str,
)
def test_4_bit_weights_are_never_all_in_memory_in_bfloat16(
    measured: dict[tuple[Any, ...], dict[str, int]], case: tuple[str, None, str | None, int]
) -> None:
    """Scales take up to a fifth of the 4-bit levels. Embeddings keep 16 bits; one may be an int8 projection."""
    found = measured[case]
    in_bfloat16 = 2 * (found["weights"] - 2 * _EMBEDDING)
    assert found["kept"] < 0.35 * in_bfloat16 + 3 * _EMBEDDING + _SLACK
    assert found["peak"] < found["kept"] + 2 * _LARGEST[case[0] == "mxfp4"] + _SLACK
