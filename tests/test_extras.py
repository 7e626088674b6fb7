"""Error messages name the command that installs an extra where the package is: in a checkout, or installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight import extras


def test_the_command_is_for_a_checkout_or_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extras.how_to_install("kserve") == "pip install -e '.[kserve]' in the checkout"
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert extras.how_to_install("kserve") == "pip install 'inflight[kserve]'"
