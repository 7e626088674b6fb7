"""The least size of weights, by files' headers, against the size that a load computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config import EngineConfig
from inflight.doctor.weight_bytes import of_own_layers
from inflight.engine.load_decoder import weight_bytes
from inflight.models import read_model_description
from inflight.models.sharding import Part
from tests.models import quantized
from tests.models.zoo import Zoo

CASES = (
    *(
        "llama",
        "qwen2",
        "mixtral",
        "gpt-oss",
        "deepseek-v3",
        "gemma3n",
        "qwen3.5-moe",
        "nemotron-h",
        "gpt2",
        "bloom",
    ),
    *("gemma3-vision", "llama4-vision", "qwen2-vl", "llava"),
)
FORMATS = ("fp8-block", "ct-int8", "ct-int4-zeros", "ct-nvfp4", "awq", "gptq")
DTYPES = (None, "float32", "bfloat16", "int8", "fp8")


def shares(folder: Path) -> dict[str | None, float]:
    """Return the least size as a share of the size that a load computes, by dtype."""
    model = read_model_description(folder)
    files, part = sorted(folder.glob("*.safetensors")), Part.whole(model.decoder)
    found: dict[str | None, float] = {}
    for dtype in DTYPES:
        config = EngineConfig(gpt_model_path=str(folder), dtype=dtype)
        exact = weight_bytes(config, model, torch.device("cpu"), part)
        found[dtype] = of_own_layers(model, files, dtype).least / exact
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_model_takes_less(zoo: Zoo, case: str) -> None:
    assert all(0.5 < share <= 1 for share in shares(zoo[case].folder).values())


@pytest.mark.parametrize("name", FORMATS)
def test_no_quantized_model_takes_less(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = quantized.write(zoo["llama-gqa"], tmp_path, quantized.FORMATS[name], dtype="bfloat16")
    found = shares(model.folder)
    assert all(0 < share <= 1 for share in found.values())
    assert found[None] > 0.45
