"""The check of commits refuses wrong subjects of commits that the remote does not have."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_commits.py"))
GOOD = "docs: describe the form"
BAD = "Form described"
ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | {
    f"GIT_{role}_{key}": "tests@example.com" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
}


def git(folder: Path, *arguments: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, env=inherited | ENVIRONMENT
    )


def commit(folder: Path, *subjects: str) -> None:
    for subject in subjects:
        git(folder, "commit", "--allow-empty", "-m", subject)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository without commits and without a remote."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-b", "main")
    return folder


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, str]]:
    return lambda folder: (PROGRAM["main"](folder), capsys.readouterr().err)


@pytest.mark.parametrize(
    "subject",
    [
        GOOD,
        "core, engine: count what is read",
        "tests/core,docs: name a thing",
        "ci_2: a b",
        "docs: " + "a " * 32 + "bb",
    ],
)
def test_a_subject_of_the_form_is_accepted(subject):
    assert PROGRAM["is_accepted"](subject)


@pytest.mark.parametrize(
    "subject",
    [BAD, "Docs: describe the form", "docs: format", "docs:describe the form", "the docs: describe it", "",
     "docs: " + "a " * 32 + "bbb"],
)  # fmt: skip
def test_a_subject_of_another_form_is_refused(subject):
    assert not PROGRAM["is_accepted"](subject)


@pytest.mark.parametrize(("subjects", "status"), [((BAD, GOOD), 0), ((GOOD, BAD), 1)])
def test_without_a_remote_the_last_commit_is_checked(check, checkout, subjects, status):
    commit(checkout, *subjects)
    result, messages = check(checkout)
    assert result == status
    assert (BAD in messages) == bool(status)


def test_commits_that_the_remote_has_are_exempt(check, checkout, tmp_path):
    commit(checkout, GOOD, BAD)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", str(checkout), str(clone))
    assert check(clone) == (0, "")
    commit(clone, "Another form", GOOD)
    status, messages = check(clone)
    assert status == 1
    assert "Another form" in messages
    assert BAD not in messages


def test_a_shallow_clone_is_accepted(check, checkout, tmp_path):
    commit(checkout, GOOD, BAD)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--depth", "1", f"file://{checkout}", str(clone))
    assert check(clone) == (0, "")
    commit(clone, GOOD)
    assert check(clone) == (0, "")


def test_merges_are_exempt(check, checkout):
    commit(checkout, GOOD)
    git(checkout, "checkout", "-b", "side")
    commit(checkout, GOOD)
    git(checkout, "checkout", "main")
    git(checkout, "merge", "--no-ff", "-m", "Merge branch 'side'", "side")
    assert check(checkout) == (0, "")


def test_other_folders_and_repositories_without_commits_are_accepted(check, checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert check(tmp_path) == (0, "")
    assert check(checkout) == (0, "")


def test_a_machine_without_git_is_accepted(check, checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert check(checkout) == (0, "")
