"""Integers from clients, however large, never become a size beyond the model's limits."""

from __future__ import annotations

from pathlib import Path

from tests.own_process import run_checks


def test_no_integer_becomes_a_size_beyond_the_limits() -> None:
    run_checks(Path(__file__).with_name("check_large_integers.py"), timeout_s=300)
