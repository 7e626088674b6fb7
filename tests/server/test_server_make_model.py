"""Random-weight checkpoints, read by the library that defines their format."""

from pathlib import Path

import pytest
import torch

from inflight.testing.make_model import ARCHITECTURES, SHAPES, make_model, num_weights
from inflight.testing.synthetic_tokenizer import make_tokenizer

TEXT = "Hello world, 42 émigrés in 日本\n\tand elsewhere."


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_transformers_loads_every_tensor_and_misses_none(family: str, tmp_path: Path) -> None:
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
def test_the_tokenizer_has_the_size_asked_for_and_knows_every_text(size: int) -> None:
    tokenizer = make_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 259"):
        make_tokenizer(258)
