"""The server's and the client's converter, whose files must be equal byte by byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.adapters.client_modules import client_modules
from inflight.adapters.convert_lora import main
from inflight.adapters.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_lora_files
from inflight.adapters.peft_folder import read_peft_folder
from inflight.models.registry import read_model_description
from inflight_client import lora as client
from inflight_client import lora_modules
from inflight_client.__main__ import main as client_main
from tests.adapters.factories import linear_layers, make_peft_model, save_adapter
from tests.models.zoo import Zoo

TYPES = ["float16", "float32", "bfloat16"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7},
    "rslora": {"r": 5, "lora_alpha": 3, "use_rslora": True},
    "patterns": {"r": 4, "rank_pattern": {r".*\.1\..*": 2}, "alpha_pattern": {"mlp.*": 5, "attn.*": 0.3}},
}


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (WEIGHTS_FILE, CONFIG_FILE)]


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=list(ADAPTERS))
def test_both_converters_write_the_same_bytes(
    zoo: Zoo, tmp_path: Path, case: str, options: dict[str, Any], stored: torch.dtype
) -> None:
    adapted = make_peft_model(zoo[case], target_modules=linear_layers(case), **options)
    folder = save_adapter(adapted, tmp_path / "peft")
    path = folder / "adapter_model.safetensors"
    save_file({name: each.to(stored) for name, each in load_file(path).items()}, path)
    for kind in TYPES:
        assert main([str(folder), str(tmp_path / kind), "--storage-type", kind]) == 0
        assert (
            client_main(["convert-lora", str(folder), str(tmp_path / f"c{kind}"), "--storage-type", kind])
            == 0
        )
        assert files(tmp_path / kind) == files(tmp_path / f"c{kind}")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_both_converters_read_an_adapter_of_a_multimodal_models_text_part(
    zoo: Zoo, tmp_path: Path, prefix: str
) -> None:
    text = r".*language_model\..*\.(q_proj|down_proj)"
    folder = save_adapter(make_peft_model(zoo["qwen2.5-vl"], target_modules=text), tmp_path / "peft")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path).items()
    save_file({name.replace("model.language_model.", prefix): each for name, each in tensors}, path)
    assert main([str(folder), str(tmp_path / "ours")]) == 0
    assert client_main(["convert-lora", str(folder), str(tmp_path / "clients")]) == 0
    assert files(tmp_path / "ours") == files(tmp_path / "clients")


def test_both_converters_swap_the_halves_of_a_fused_gate_and_up(tmp_path: Path) -> None:
    path = "base_model.model.model.layers.0.mlp.gate_up_proj"
    tensors = {f"{path}.lora_A.weight": torch.ones(1, 4), f"{path}.lora_B.weight": torch.arange(6.0)[:, None]}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    weights, config = client.load_lora(tmp_path, "float32")
    assert weights.tolist() == [[[1, 1, 1, 1, 3, 4, 5, 0, 1, 2]]]
    assert config.tolist() == [[[18, 0, 1, 0]]]
    ours = read_peft_folder(tmp_path)
    assert bytes(ours.weights.buffer.data) == weights.tobytes()
    assert ours.config == ((18, 0, 1, 0),)


def test_the_clients_table_is_the_generated_one() -> None:
    path = Path(lora_modules.__file__)
    assert path.read_text(encoding="utf-8") == client_modules(), f"{path}: run scripts/write_configs"
    ids = lora_modules.MODULE_IDS
    assert (ids["self_attn.qkv_proj"], ids["mlp.gate_up_proj"], ids["shared_mlp.input_linear"]) == (0, 18, 18)


@pytest.mark.parametrize("kind", TYPES)
def test_the_client_loads_the_files_that_were_written(zoo: Zoo, tmp_path: Path, kind: Any) -> None:
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=["q_proj", "down_proj"], r=2)
    folder = save_adapter(adapted, tmp_path / "peft")
    client.convert_lora(folder, tmp_path / "out", kind)
    for weights, config in (client.load_lora(folder, kind), client.load_lora(tmp_path / "out", kind)):
        assert weights.dtype == (np.float16 if kind == "float16" else np.float32)
        expected = read_lora_files(tmp_path / "out")
        assert config.tolist() == [[list(row) for row in expected.config]]
        numbers = torch.frombuffer(bytearray(expected.weights.buffer.data), dtype=getattr(torch, kind))
        assert torch.equal(torch.from_numpy(weights).flatten(), numbers.to(torch.from_numpy(weights).dtype))


def test_bfloat16_is_rounded_like_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    floats = bits.view(np.float32)
    rounded = torch.from_numpy(floats.copy()).bfloat16().float().numpy()
    kept = np.isfinite(rounded) & np.isfinite(floats)
    assert kept.sum() > 19_000
    assert np.array_equal(client._cast(floats[kept], "bfloat16", "x"), rounded[kept])
    for wrong in (np.nan, np.inf, np.finfo(np.float32).max):
        with pytest.raises(ValueError, match="numbers that bfloat16 cannot hold"):
            client._cast(np.array([wrong], np.float32), "bfloat16", "x")


def test_converting_dora_needs_the_model(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"], use_dora=True)
    folder, out = save_adapter(adapted, tmp_path / "peft"), tmp_path / "out"
    assert main([str(folder), str(out)]) == 1
    assert "convert_lora --model" in capsys.readouterr().err
    assert client_main(["convert-lora", str(folder), str(out)]) == 1
    assert "convert_lora --model" in capsys.readouterr().err
    assert not out.exists()
    model = zoo["llama-gqa"].folder
    assert main([str(folder), str(out), "--model", str(model), "--storage-type", "float32"]) == 0
    assert read_lora_files(out) == read_peft_folder(folder, read_model_description(model), "float32")


def test_numbers_that_float16_cannot_hold_are_refused(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"], lora_alpha=10**7)
    folder = save_adapter(adapted, tmp_path / "peft")
    for convert in (main, lambda given: client_main(["convert-lora", *given])):
        assert convert([str(folder), str(tmp_path / "out")]) == 1
        assert "numbers that float16 cannot hold" in capsys.readouterr().err
        assert convert([str(folder), str(tmp_path / "out"), "--storage-type", "bfloat16"]) == 0


def test_errors_name_damaged_and_missing_folders(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"]), tmp_path / "peft")
    tensors = folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    for data in (b"", b"\x08\0\0\0\0\0\0\0[1, 2, 3", whole[: len(whole) // 2], b"\xff" * 100):
        tensors.write_bytes(data)
        for convert in (main, lambda given: client_main(["convert-lora", *given])):
            assert convert([str(folder), str(tmp_path / "out")]) == 1
            assert "read" in capsys.readouterr().err
    missing = [str(tmp_path / "none"), str(tmp_path / "out")]
    assert client_main(["convert-lora", *missing]) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(missing)
    assert f"{tmp_path / 'none'}: no such folder" in capsys.readouterr().err


def test_the_client_imports_no_server_code() -> None:
    code = "import sys, inflight_client.lora; print(*{'torch', 'inflight', 'safetensors'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
