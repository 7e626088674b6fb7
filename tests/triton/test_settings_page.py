"""docs/settings.md has every setting once, by the declarations, and every environment variable of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.config import PARAMETERS
from inflight.parameter_names import OTHER_NAMES
from inflight.server import cli
from inflight.triton.reference_pages import fill_in
from inflight.triton.settings_page import FIELDS, GROUPS, settings_reference

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
BUILT = {spec.key for spec in (*FIELDS, *PARAMETERS) if spec.built}


def test_the_page_matches_the_declarations() -> None:
    assert fill_in(PAGE, settings_reference()) == PAGE, "run scripts/write_configs"


def test_every_setting_is_in_one_group() -> None:
    keys = [key for group in GROUPS.values() for key in group]
    assert sorted(keys) == sorted(BUILT), "list it in GROUPS of triton/settings_page.py"


def test_other_names_belong_to_settings_and_their_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(OTHER_NAMES) <= BUILT
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {names.flag for names in OTHER_NAMES.values()} - {""} <= flags


def test_no_setting_is_newer_than_the_package() -> None:
    version = re.search(r'^version = "([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = max([int(part) for part in spec.since.split(".")] for spec in PARAMETERS)
    assert version and newest <= [int(part) for part in version[1].split(".")]


def test_the_page_has_every_environment_variable_of_the_package() -> None:
    sources = [
        *(ROOT / "backend").rglob("*.py"),
        *(ROOT / "client").rglob("*.py"),
        *(ROOT / "scripts").iterdir(),
    ]
    used = {
        name
        for path in sources
        if path.is_file()
        for name in re.findall(r"[\"'{$](INFLIGHT_[A-Z_]+)\b", path.read_text(encoding="utf-8"))
    }
    listed = re.findall(r"^\| `(INFLIGHT_[A-Z_]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(used)


def test_the_site_finds_the_page_first() -> None:
    assert re.match(r"---\nsearch:\n  boost: [2-9]\n---\n", PAGE)
