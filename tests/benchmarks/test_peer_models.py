"""Errors for a peer's model that differs or has another dtype."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from benchmarks.comparing.peer_models import check_peer_model

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
BF16, Q8_0, Q4_0, Q6_K = 30, 8, 2, 14


@pytest.fixture
def model(tmp_path) -> Path:
    return folder(tmp_path / "model")


def folder(path: Path, **other: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | other))
    return path


def export(path: Path, weight_type: str, **other: int) -> Path:
    """Write an export like OpenVINO's: a big constant of the type, and small ones of another type."""
    folder(path, **other)
    constants = [(weight_type, 64 * 512), ("f32", 64), ("i64", 8)]
    layers = [
        f'<layer id="{number}" type="Const"><data element_type="{kind}" offset="0" size="{size}"/></layer>'
        for number, (kind, size) in enumerate(constants)
    ]
    (path / "openvino_model.xml").write_text(f"<net><layers>{''.join(layers)}</layers></net>")
    return path


def gguf(path: Path, weight_type: int, hidden_size: int = 64) -> Path:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    def number(name: str, value: int) -> bytes:
        return string(name) + struct.pack("<II", 4, value)

    def tensor(name: str, shape: tuple[int, ...], kind: int) -> bytes:
        return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)

    values = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("some.names") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b"),
        number("llama.embedding_length", hidden_size),
        number("llama.block_count", 2),
    ]
    tensors = [
        tensor("output_norm.weight", (hidden_size,), 0),
        tensor("token_embd.weight", (hidden_size, 512), weight_type),
    ]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    path.write_bytes(head + b"".join(values + tensors))
    return path


@pytest.mark.parametrize(("kind", "dtype"), [("f16", "bfloat16"), ("bf16", "bfloat16"), ("i8", "int8")])
def test_an_export_of_the_model_in_the_dtype_is_accepted(model, tmp_path, kind, dtype):
    check_peer_model(export(tmp_path / "export", kind), model, dtype)


@pytest.mark.parametrize(("kind", "dtype"), [(BF16, "bfloat16"), (Q8_0, "int8"), (Q4_0, "int4")])
def test_a_gguf_file_of_the_model_in_the_dtype_is_accepted(model, tmp_path, kind, dtype):
    check_peer_model(gguf(tmp_path / "m.gguf", kind), model, dtype)


@pytest.mark.smoke
def test_a_checkpoint_is_accepted_in_any_dtype(model, tmp_path):
    for dtype in ("bfloat16", "int8"):
        check_peer_model(folder(tmp_path / dtype), model, dtype)


def test_weights_of_another_dtype_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="most weights are int8, expected bfloat16"):
        check_peer_model(export(tmp_path / "export", "u8"), model, "bfloat16")
    with pytest.raises(ValueError, match="most weights are bfloat16, expected int8"):
        check_peer_model(gguf(tmp_path / "m.gguf", BF16), model, "int8")
    with pytest.raises(ValueError, match="most weights are GGUF type 14, expected int4"):
        check_peer_model(gguf(tmp_path / "n.gguf", Q6_K), model, "int4")


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_an_export_of_another_model_is_refused(model, tmp_path, name):
    with pytest.raises(ValueError, match=r"export: \w+ is 7, expected \d+ as in .*model"):
        check_peer_model(export(tmp_path / "export", "f16", **{name: 7}), model, "bfloat16")


def test_a_gguf_file_of_another_model_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="hidden_size is 32, expected 64"):
        check_peer_model(gguf(tmp_path / "m.gguf", BF16, hidden_size=32), model, "bfloat16")


def test_a_folder_that_is_not_a_model_is_refused(model, tmp_path):
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "nothing"):
        with pytest.raises(ValueError, match=f"--peer-model {path}: cannot be read"):
            check_peer_model(path, model, "bfloat16")


def test_a_truncated_file_is_refused(model, tmp_path):
    path = gguf(tmp_path / "m.gguf", BF16)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match="cannot be read"):
        check_peer_model(path, model, "bfloat16")
