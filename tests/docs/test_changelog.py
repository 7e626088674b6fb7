"""CHANGELOG.md, the packages, `inflight --version` and the tag in docs/contributing.md have the same version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight import cli

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)


def newest_section() -> str:
    """Return the version in the first heading of a version in CHANGELOG.md."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((?:not yet released|\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    assert newest
    return newest[1]


def test_the_newest_section_is_that_of_the_packages() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "client" / "pyproject.toml"]
    versions = {VERSION.findall(file.read_text(encoding="utf-8"))[0] for file in files}
    assert versions == {newest_section()}


def test_the_command_prints_the_version_of_the_newest_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"inflight {newest_section()}\n"


def test_the_tag_of_a_release_is_v_and_its_version() -> None:
    steps = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    tags = re.findall(r"git tag -a v(\S+) -m (\S+)`", steps)
    assert tags == [(newest_section(), newest_section())]
