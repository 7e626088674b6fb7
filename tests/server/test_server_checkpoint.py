"""--model with a name from the Hugging Face hub; nothing is fetched."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.server.checkpoint import find_checkpoint
from inflight.server.errors import OptionError


def test_a_folder_may_have_any_letters_but_not_any_bytes(tmp_path: Path) -> None:
    for name, expected in (("Modèle 模型".encode(), None), ("Modèle".encode("latin-1"), "name is not UTF-8")):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "config.json").touch()
        if expected is None:
            assert find_checkpoint(str(folder)) == folder
        else:
            with pytest.raises(OptionError, match=expected):
                find_checkpoint(str(folder))


def test_a_name_is_fetched_without_other_formats_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert find_checkpoint("some-owner/some_model-1.5") == tmp_path
    assert asked[0][0] == "some-owner/some_model-1.5"
    assert "*.safetensors" in asked[0][1]
    assert not any("bin" in pattern for pattern in asked[0][1])


def test_a_failed_fetch_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("404 not found\nand much more")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(OptionError, match=r"owner/model.*: 404 not found$"):
        find_checkpoint("owner/model")


def test_without_the_hubs_client_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(OptionError, match="pip install huggingface_hub"):
        find_checkpoint("owner/model")


@pytest.mark.parametrize("name", ["./missing", "/missing", "a/b/c", ""])
def test_what_looks_like_a_path_is_not_asked_for(name: str) -> None:
    with pytest.raises(OptionError, match=r"not a folder|no config\.json"):
        find_checkpoint(name)
