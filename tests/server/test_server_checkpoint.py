"""--model: a folder whose path config.pbtxt can contain. tests/test_hub.py has names on the hub."""

import os
from pathlib import Path

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


def test_a_missing_file_is_an_error_that_names_the_option() -> None:
    with pytest.raises(OptionError, match=r"--model \./missing: not a folder"):
        find_checkpoint("./missing")
