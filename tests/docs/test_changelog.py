"""The newest section of CHANGELOG.md is that of the package's version, which the client's package shares."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)


def test_the_newest_section_is_that_of_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((?:not yet released|\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    files = [ROOT / "pyproject.toml", ROOT / "client" / "pyproject.toml"]
    versions = {VERSION.findall(file.read_text(encoding="utf-8"))[0] for file in files}
    assert newest and versions == {newest[1]}
