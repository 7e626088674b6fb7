"""Heads for sequence classification: broken files, and what makes probabilities of products."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inflight.classification import Activation, ClassificationHead, read_classification_head
from inflight.errors import ConfigError


def write(folder: Path, head: torch.Tensor | None, **config: object) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForSequenceClassification"], **config})
    )
    tensors = {"model.norm.weight": torch.ones(4), **({} if head is None else {"score.weight": head})}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_weights_are_those_in_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 4).to(dtype)
    head = read_classification_head(write(tmp_path, weight, id2label={"0": "a", "2": "c"}))
    assert head.weight.dtype == np.float32
    assert torch.equal(torch.from_numpy(head.weight.copy()), weight.float())
    assert (head.labels, head.activation) == (("a", "LABEL_1", "c"), Activation.SOFTMAX)


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (None, "model.safetensors has no tensor score.weight"),
        (torch.ones(3), r"score.weight of F32 \[3\]"),
        (torch.ones(0, 4), r"score.weight of F32 \[0, 4\]"),
        (torch.ones(2, 4, dtype=torch.int8), r"score.weight of I8 \[2, 4\]"),
    ],
)
def test_broken_heads_are_named(tmp_path: Path, head: torch.Tensor | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_classification_head(write(tmp_path, head))


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, torch.ones(2, 4))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="in 31 bytes"):
        read_classification_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_classification_head(folder)
    index = folder / "model.safetensors.index.json"
    for text, named in (
        ("{", "cannot be read as JSON"),
        ('{"weight_map": {}}', "names no file"),
        ("[]", "no file"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigError, match=named):
            read_classification_head(folder)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation.SOFTMAX, lambda products: products.softmax(-1)),
        (Activation.SIGMOID, torch.sigmoid),
        (Activation.NONE, lambda products: products),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_probabilities_are_those_of_torch(activation: Activation, expected: object, scale: float) -> None:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * scale
    hidden = torch.tensor([0.5, -1.0, 2.0, 1.5])
    head = ClassificationHead(weight.numpy(), ("a", "b", "c"), activation)
    assert callable(expected)
    products = weight @ hidden
    np.testing.assert_allclose(head.apply(hidden.numpy()), expected(products), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head.apply(hidden.numpy(), is_activated=False), products, rtol=1e-5)
