"""An engine releases all resources of its process."""

from __future__ import annotations

from pathlib import Path

from tests.own_process import run_checks


def test_an_engine_in_a_process_of_its_own_releases_all_resources() -> None:
    """Threads, files and memory are counted, and other tests would leave some of them."""
    run_checks(Path(__file__).with_name("check_release.py"), timeout_s=300)
