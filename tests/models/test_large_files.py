"""Files that do not fit config.json are refused by their headers, without reading many GB of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.config import EngineConfig
from inflight.engine import load_decoder
from inflight.engine.load import load_engine
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.loader import check_weights, tensor_shapes
from tests.models.sparse_files import MAX_READ, SparseTensor, bytes_in_memory, write_sparse

Shapes = dict[str, tuple[int, ...]]
_LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}


def _write(folder: Path, shapes: Shapes) -> list[Path]:
    return write_sparse(folder, (SparseTensor(name, "BF16", shape) for name, shape in shapes.items()))


def _without(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name != "model.layers.31.mlp.down_proj.weight"}


def _with_more(shapes: Shapes) -> Shapes:
    return {**shapes, "model.layers.32.mlp.down_proj.weight": (4096, 11008)}


def _reshaped(shapes: Shapes) -> Shapes:
    return {**shapes, "model.layers.31.mlp.down_proj.weight": (11008, 4096)}


def _with_another_head(shapes: Shapes) -> Shapes:
    """Add an output head beside the tied embedding."""
    return {**shapes, "lm_head.weight": (32001, 4096)}


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied-with-both-stored"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "missing model.layers.31.mlp.down_proj.weight; unexpected none"),
        (_with_more, "missing none; unexpected model.layers.32.mlp.down_proj.weight"),
        (
            _reshaped,
            "'model.layers.31.mlp.down_proj.weight' has shape [11008, 4096], expected [4096, 11008]",
        ),
        (_with_another_head, "'lm_head.weight' has shape [32001, 4096], expected [32000, 4096]"),
    ],
)
def test_tensors_that_do_not_fit_are_found_in_the_files_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, message: str, is_tied: bool
) -> None:
    config = {**_LLAMA_7B, "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {**tensor_shapes(read_model_description(tmp_path)), "lm_head.weight": (32000, 4096)}
    paths = _write(tmp_path, change(shapes))
    assert sum(path.stat().st_size for path in paths) > 13e9

    def compile_layers(*_: object) -> None:
        raise AssertionError("the checkpoint is looked at before anything is compiled")

    monkeypatch.setattr(load_decoder, "load_library", compile_layers)
    with pytest.raises(ConfigError) as error:
        load_engine(EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu"))
    assert message in str(error.value)
    assert all(bytes_in_memory(path) < MAX_READ for path in paths)


def test_weights_of_fitting_files_are_not_read_by_the_check(tmp_path: Path) -> None:
    """The second part checks that the test detects weights that are read."""
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA_7B))
    model = read_model_description(tmp_path)
    paths = _write(tmp_path, tensor_shapes(model))
    check_weights(model)
    assert all(bytes_in_memory(path) < MAX_READ for path in paths)
    with paths[0].open("rb") as file:
        file.read(2 * MAX_READ)
    assert bytes_in_memory(paths[0]) >= 2 * MAX_READ
