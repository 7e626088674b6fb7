"""The source distribution is complete: a wheel built from it equals one built in the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("backend", "model_repository", "benchmarks", "client")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def build_wheel(source: Path, folder: Path) -> dict[str, bytes]:
    """Build a wheel and return its files by name, without the list of their digests."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "-w", folder, source], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_a_wheel_of_the_source_distribution_equals_one_of_the_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt", "*.so")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    subprocess.run(
        [sys.executable, "-c", BUILD_SDIST, tmp_path / "dist"], cwd=checkout, check=True, timeout=300
    )
    (sdist,) = (tmp_path / "dist").glob("inflight-*.tar.gz")
    built = build_wheel(sdist, tmp_path / "from_sdist")
    assert built == build_wheel(checkout, tmp_path / "from_checkout")
    assert "inflight/bundled/model_repository/tensorrt_llm/1/demo_model/model.safetensors" in built
