"""Checkpoints with random weights, loaded by transformers, which defines their format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.testing.make_model import (
    ARCHITECTURES,
    QUANTIZED_FORMATS,
    SHAPES,
    main,
    make_model,
    num_weights,
)
from inflight.testing.quantize import FORMATS, MXFP4
from inflight.testing.synthetic_tokenizer import make_tokenizer

TEXT = "Hello world, 42 émigrés in 日本\n\tand elsewhere."


def test_a_file_in_the_place_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "file")])
    assert f"--out: expected a folder that can be written, got '{tmp_path}/file': " in capsys.readouterr().err


def test_an_empty_name_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", ""])
    assert "--out: expected the name of a folder, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "model.gguf"])
def test_weights_of_another_model_are_not_replaced(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(1)}, tmp_path / name, metadata={"format": "pt"})
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert f"argument --out: {tmp_path / name} was not written by this command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_random_weights_are_replaced(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        assert main(["--out", str(tmp_path), "--seed", seed]) == 0


@pytest.mark.parametrize(("flag", "value"), [("--seed", str(2**63)), ("--seed", "-1"), ("--std", "-0.1")])
def test_a_number_that_no_weights_are_drawn_with_is_refused(
    tmp_path: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "model"), f"{flag}={value}"])
    assert f"argument {flag}: expected a " in capsys.readouterr().err


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_transformers_loads_exactly_the_written_tensors(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_model(tmp_path / family, family)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == ARCHITECTURES[family]
    assert not any(info.values()), info
    assert model.dtype is torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.eos_token_id == 2


def test_mxfp4_experts_are_close_to_the_random_weights(tmp_path: Path) -> None:
    """transformers unpacks the MXFP4 experts for the comparison; all other tensors must be identical."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    plain, packed = (
        load_file(make_model(tmp_path / str(quantize), "gpt_oss", quantize=quantize) / "model.safetensors")
        for quantize in (None, "mxfp4")
    )
    stacks = [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    for name in stacks:
        parts = packed.pop(f"{name}_blocks"), packed.pop(f"{name}_scales")
        drawn = plain.pop(name).float()
        blocks = drawn.transpose(1, 2).unflatten(-1, (-1, 32))
        found = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32).transpose(1, 2).view_as(blocks)
        # Numbers near 6 are 2 apart, and numbers below 8 become 6: the error is at most a quarter of a
        # block's maximum.
        assert ((found - blocks).abs() <= 0.25 * blocks.abs().amax(-1, keepdim=True)).all()
        assert (found - blocks).square().mean().sqrt() < 0.15 * drawn.std()
    assert packed.keys() == plain.keys()
    assert all(torch.equal(packed[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("options", [("llama", "mxfp4"), ("gpt_oss", "gptq")])
def test_an_unsupported_format_of_a_family_is_refused(
    tmp_path: Path, options: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    family, quantize = options
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--family", family, "--quantize", quantize])
    assert f"--quantize {quantize} --family {family}: mxfp4 goes with gpt_oss" in capsys.readouterr().err


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = [
        make_model(tmp_path / str(n), seed=seed) / "model.safetensors" for n, seed in enumerate((1, 1, 2))
    ]
    same, again, other = (file.read_bytes() for file in files)
    assert same == again
    assert same != other


@pytest.mark.parametrize(("shape", "millions"), [("135m", 134.5), ("1b", 1235.8)])
def test_the_large_shapes_have_the_sizes_in_their_names(shape: str, millions: float) -> None:
    assert round(num_weights("llama", SHAPES[shape]) / 1e6, 1) == millions
    assert SHAPES[shape].head_dim == 64


@pytest.mark.parametrize("size", [259, 512, 5000])
def test_the_tokenizer_has_the_requested_size_and_encodes_every_text(size: int) -> None:
    tokenizer = make_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 259"):
        make_tokenizer(258)


def test_the_command_offers_every_quantized_format() -> None:
    assert {*QUANTIZED_FORMATS} == {*FORMATS, MXFP4}
