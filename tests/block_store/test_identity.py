"""The identity of KV blocks changes with everything on which their content depends."""

from __future__ import annotations

import json

import pytest

from inflight.block_store import cache_identity

SETTINGS = {"dtype": "float32", "instruction_set": "avx2"}
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 * MIB)
    return tmp_path


def test_the_same_model_and_settings_have_the_same_identity(folder):
    assert cache_identity({"": folder}, SETTINGS) == cache_identity({"": folder}, dict(SETTINGS))
    (folder / "notes.txt").write_text("not a part of the model")
    (folder / "empty").mkdir()
    assert len(cache_identity({"": folder}, SETTINGS)) == 32


def test_a_change_of_settings_files_or_weights_changes_the_identity(folder):
    found = {cache_identity({"": folder}, SETTINGS)}
    found.add(cache_identity({"": folder}, SETTINGS | {"dtype": "bfloat16"}))
    found.add(cache_identity({"engine_dir/": folder}, SETTINGS))
    (folder / "config.json").write_text('{"a": 2}')
    found.add(cache_identity({"": folder}, SETTINGS))
    for place in (8, 12 * MIB, 30 * MIB):  # as if a matrix of 5 MiB were changed there
        with (folder / "model.safetensors").open("rb+") as file:
            file.seek(place)
            file.write(b"\x01" * 5 * MIB)
        found.add(cache_identity({"": folder}, SETTINGS))
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(41 * MIB)
    found.add(cache_identity({"": folder}, SETTINGS))
    assert len(found) == 8


def test_a_change_of_a_small_tensor_changes_the_identity(folder):
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "norm": {"dtype": "F32", "shape": [256], "data_offsets": [9 * MIB + 8192, 9 * MIB + 9216]},
            "matrix": {"dtype": "F32", "shape": [256], "data_offsets": [0, 9 * MIB + 8192]},
        }
    ).encode()
    with (folder / "model.safetensors").open("rb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)
    found = {cache_identity({"": folder}, SETTINGS)}
    with (folder / "model.safetensors").open("rb+") as file:
        file.seek(8 + len(header) + 9 * MIB + 8192)
        file.write(b"\x01" * 1024)
    found.add(cache_identity({"": folder}, SETTINGS))
    assert len(found) == 2


@pytest.mark.parametrize("header", [b"[1]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}'])
def test_a_file_that_looks_like_safetensors_is_sampled_too(folder, header):
    before = cache_identity({"": folder}, SETTINGS)
    with (folder / "model.safetensors").open("rb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)
    assert cache_identity({"": folder}, SETTINGS) != before
