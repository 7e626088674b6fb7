"""Kernels for the layers: this machine's default, native code if it can be compiled, and torch's operators."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from inflight.engine.cpu.library import CannotBuild, load_library

DEFAULT = pytest.param(None, id="default")
TORCH = pytest.param("torch", id="torch")


@functools.cache
def why_no_native() -> str:
    """Return the reason why there is no compiled code on this machine; "" if there is."""
    try:
        load_library("bfloat16", int8=True)
    except CannotBuild as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(why_no_native()), reason=f"no compiled code: {why_no_native()}")


def by_default_and(on_torch: Iterable[Any], by_default: Sequence[Any]) -> list[Any]:
    """Return parameters ("…", "kernels"): all with the default, some with torch's operators too."""
    wide = [pytest.param(each, None, id=f"{each}-default") for each in by_default]
    return wide + [pytest.param(each, "torch", id=f"{each}-torch") for each in on_torch]
