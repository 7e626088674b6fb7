"""The source distribution is complete: a wheel built from it equals one built in the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .installation import build_wheel, copy_sources

pytestmark = pytest.mark.exhaustive

BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def files_of(wheel: Path) -> dict[str, bytes]:
    """Return a wheel's files by name, without the list of their digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_a_wheel_of_the_source_distribution_equals_one_of_the_checkout(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path / "checkout")
    subprocess.run(
        [sys.executable, "-c", BUILD_SDIST, tmp_path / "dist"], cwd=checkout, check=True, timeout=300
    )
    (sdist,) = (tmp_path / "dist").glob("inflight-*.tar.gz")
    built = files_of(build_wheel(sdist, tmp_path / "from_sdist"))
    assert built == files_of(build_wheel(checkout, tmp_path / "from_checkout"))
    assert "inflight/bundled/model_repository/tensorrt_llm/1/demo_model/model.safetensors" in built
