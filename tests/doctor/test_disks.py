"""Findings about full disks and folders that cannot be written, planted in Python's functions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from huggingface_hub import constants

from inflight.doctor import disks
from inflight.doctor.finding import Finding, Level

from .test_machine import GREEN, RED, YELLOW, only

Usage = namedtuple("Usage", "total used free")
CHECKS = [
    (disks.check_temporary_folder, 16 << 20, RED, "TMPDIR"),
    (disks.check_own_cache, 32 << 20, YELLOW, "XDG_CACHE_HOME"),
    (disks.check_hub_cache, 1 << 30, YELLOW, "HF_HOME"),
]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "made" / "yet"))
    return tmp_path


@pytest.mark.parametrize(("check", "needed", "level", "variable"), CHECKS)
def test_a_full_disk_is_reported(
    check: Callable[[], Iterable[Finding]],
    needed: int,
    level: Level,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for free, expected in ((needed, GREEN), (needed - 1, level)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: Usage(2 << 40, 1 << 40, free))
        found = only(check())
        assert found.level is expected and str(tmp_path) in found.says, found
        assert (f"set {variable} to" in found.mend) is (expected is not GREEN)
    assert f"{(needed - 1) >> 20} MiB free" in found.says and "free space in" in found.mend


def test_caches_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    hub = only(disks.check_hub_cache())
    assert hub.level is YELLOW and f"{tmp_path} is not writable" in hub.says
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path))
    own = only(disks.check_own_cache())
    assert own.level is YELLOW and "layers are compiled at every start" in own.says
