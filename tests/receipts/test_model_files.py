"""Digests of a checkpoint's files: which files, the cache, and files that change."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from inflight.errors import Unavailable
from inflight.receipts.model_files import BackgroundDigests, ModelFiles

LARGE = bytes(range(256)) * (1 << 13)  # 2 MiB


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, with a user's cache of its own beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(LARGE)
    (folder / "README.md").write_text("# A model")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(folder: Path, trusts_cache: bool = True) -> dict[str, str]:
    return ModelFiles({"": folder}).digests(trusts_cache)


def test_the_files_that_a_model_is_loaded_from_have_digests(folder: Path) -> None:
    names = ("config.json", "model.safetensors")
    expected = {name: sha256(folder / name) for name in names}
    assert digests(folder) == expected
    assert digests(folder) == expected, "from the cache"


def test_a_large_file_is_read_again_when_it_has_changed(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before = digests(folder)["model.safetensors"]
    weights.write_bytes(LARGE[::-1])
    os.utime(weights, ns=(1, 1))
    assert digests(folder)["model.safetensors"] == sha256(weights) != before


def test_the_cache_is_trusted_only_if_asked(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before, times = digests(folder)["model.safetensors"], weights.stat()
    weights.write_bytes(LARGE[::-1])
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests(folder)["model.safetensors"] == before
    assert digests(folder, trusts_cache=False)["model.safetensors"] == sha256(weights)


def test_a_broken_cache_is_not_used(folder: Path, tmp_path: Path) -> None:
    expected = digests(folder)
    (cached,) = (tmp_path / "cache/inflight/digests").iterdir()
    cached.write_text("nonsense")
    assert digests(folder) == expected


def test_further_folders_have_a_prefix(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("[]")
    found = ModelFiles({"": folder, "tokenizer_dir/": tmp_path / "tokenizer"}).digests()
    assert found["tokenizer_dir/tokenizer.json"] == hashlib.sha256(b"[]").hexdigest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: path.write_text("{ }"),
            "no receipts: config.json was changed after the model was loaded",
        ),
        (Path.unlink, "no receipts: config.json cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_changes_after_the_load_is_an_error(folder: Path, change, message: str) -> None:
    files = ModelFiles({"": folder})
    change(folder / "config.json")
    ended = threading.Event()
    background = BackgroundDigests(files, ended.set)
    with pytest.raises(Unavailable, match=message):
        files.digests()
    background.start()
    assert ended.wait(60) and background.have_ended
    background.close()
    with pytest.raises(Unavailable, match=message):
        background.start()
    with pytest.raises(Unavailable, match=message):
        background.result()


def test_digests_are_computed_once_and_announced(folder: Path) -> None:
    ended = threading.Event()
    background = BackgroundDigests(ModelFiles({"": folder}), ended.set)
    assert not background.have_ended
    with pytest.raises(Unavailable, match="not known yet"):
        background.result()
    background.start()
    background.start()
    assert ended.wait(60) and background.have_ended
    assert background.result() == digests(folder)
    background.close()


def test_a_closed_engine_computes_no_digests(folder: Path) -> None:
    background = BackgroundDigests(ModelFiles({"": folder}), lambda: None)
    background.close()
    background.start()
    assert not background.have_ended
