"""The least size of weights, by files' headers, against the size that a load computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config import EngineConfig
from inflight.doctor.weight_bytes import of_gguf, of_own_layers
from inflight.engine.load_decoder import weight_bytes
from inflight.gguf import folder as gguf_folder
from inflight.gguf.folder import checkpoint_of, gguf_files
from inflight.models import read_model_description
from inflight.models.sharding import Part
from tests.models import quantized
from tests.models.gguf_converter import CONVERTED, convert
from tests.models.gguf_files import write
from tests.models.zoo import Zoo
from tests.tiers import with_all

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
        "kimi-linear",
    ),
    *("gemma3-vision", "llama4-vision", "qwen2-vl", "llava", "kimi-k2.5"),
)
FORMATS = ("fp8-block", "ct-int8", "ct-int4-zeros", "ct-nvfp4", "awq", "gptq")
DTYPES = (None, "float32", "bfloat16", "int8", "fp8")


def shares(folder: Path, is_gguf: bool = False) -> dict[str | None, float]:
    """Return the least size as a share of the size that a load computes, by dtype."""
    model = read_model_description(folder)
    part = Part.whole(model.decoder)
    found: dict[str | None, float] = {}
    for dtype in DTYPES:
        config = EngineConfig(gpt_model_path=str(folder), dtype=dtype)
        exact = weight_bytes(config, model, torch.device("cpu"), part)
        if is_gguf:
            least = of_gguf(model, gguf_files(folder), dtype).least
        else:
            least = of_own_layers(model, sorted(folder.glob("*.safetensors")), dtype).least
        found[dtype] = least / exact
    return found


def shares_of_gguf(file: Path) -> dict[str | None, float]:
    return shares(checkpoint_of(file), is_gguf=True)


@pytest.mark.parametrize("case", CASES)
def test_no_model_takes_less(zoo: Zoo, case: str) -> None:
    assert all(0.5 < share <= 1 for share in shares(zoo[case].folder).values())


@pytest.mark.parametrize("name", FORMATS)
def test_no_quantized_model_takes_less(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = quantized.write(zoo["llama-gqa"], tmp_path, quantized.FORMATS[name], dtype="bfloat16")
    found = shares(model.folder)
    assert all(0 < share <= 1 for share in found.values())
    assert found[None] > 0.45


@pytest.mark.parametrize("case", ["llama", "llama-tied", "gemma3"])
@pytest.mark.parametrize("kinds", [["F32"], ["F16"], ["Q4_0"], ["Q8_0"], ["Q4_1", "Q5_0"]], ids="-".join)
def test_no_model_in_a_gguf_file_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kinds: list[str]
) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    found = shares_of_gguf(write(tmp_path / "m.gguf", case, *kinds).folder)
    assert all(0.5 < share <= 1 for share in found.values())


@pytest.mark.parametrize("case", with_all(list(CONVERTED), ["deepseek-v2", "gemma3n", "gpt-oss"]))
def test_no_architecture_of_a_gguf_file_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    found = shares_of_gguf(convert(tmp_path / "m.gguf", case).folder)
    assert all(0.5 < share <= 1 for share in found.values())
