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
BY_LIBRARIES = {
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PIP_EXTRA_INDEX_URL",
    "TRITON_SERVER_ESCAPE_LOG_MESSAGES",
}
"""Variables that only libraries read."""
IN_A_LOOP = {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
"""Variables that `num_ranks_around` reads by a name that is not written beside `environment`."""


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


def sources() -> list[str]:
    """Return the texts of all Python, C++ and shell files that a server or a client runs."""
    files = [path for folder in ("backend", "client") for path in (ROOT / folder).rglob("*")]
    files += (ROOT / "scripts").iterdir()
    kinds = ("", ".py", ".sh", ".c", ".cpp", ".h")
    return [path.read_text(encoding="utf-8") for path in files if path.is_file() and path.suffix in kinds]


def variables_in(text: str, constants: dict[str, str]) -> set[str]:
    """Return the environment variables that a file reads, or that its messages tell users to set.

    `constants`: the strings of the package's constants, by which Python files name variables.
    """
    names = re.findall(r"""environ(?:ment)?(?:\.(?:get|pop|setdefault)\(|\[)["']?(\w+)""", text)
    names += re.findall(r"""["'](\w+)["'] (?:not )?in (?:os\.)?environ""", text)
    names += re.findall(r'getenv\("(\w+)"', text)
    names += re.findall(r"\b(HF_[A-Z_]+[A-Z]|[A-Z]+_PROXY|PIP_[A-Z_]+[A-Z])\b", text)
    names += re.findall(r"[\"'{$](INFLIGHT_[A-Z_]+)\b", text)
    if text.startswith("#!/usr/bin/env bash") or text.startswith("# Sourced"):
        own = set(re.findall(r"^\s*(?:for )?([A-Z_]+)(?:=| in )", text, re.MULTILINE)) | {
            "ROOT",
            "VENV",
            "PYTHON",
            "BASH_SOURCE",
        }
        names += set(re.findall(r"\$\{?([A-Z][A-Z_]+)", text)) - own
    named = (constants.get(name, name) for name in names)
    return {name for name in named if re.fullmatch(r"[A-Z][A-Za-z_]+", name)}


def test_the_page_has_every_environment_variable_that_the_code_reads() -> None:
    texts = sources()
    constants = {
        name: value for text in texts for name, value in re.findall(r'^(_?[A-Z_]+) = "(\w+)"$', text, re.M)
    }
    read = set[str]().union(*(variables_in(text, constants) for text in texts))
    rows = re.findall(r"^\| (`[^|]+) \|", PAGE.split("## Environment variables")[1], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(read) > 25
    assert sorted(listed) == sorted(read | BY_LIBRARIES | IN_A_LOOP), read ^ set(listed)


def test_the_site_finds_the_page_first() -> None:
    assert re.match(r"---\nsearch:\n  boost: [2-9]\n---\n", PAGE)
