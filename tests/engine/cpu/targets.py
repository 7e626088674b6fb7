"""The targets for which tests of compiled layers run."""

from __future__ import annotations

import pytest

from tests.engine.cpu import emulation
from tests.tiers import with_all

OWN, GENERIC = "own", "generic"  # this machine's fastest target; the target of any machine
ARM = [pytest.param(name, marks=emulation.needs_emulator, id=name) for name in emulation.TARGETS]


def _on(targets: list[object], by_default: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", with_all(targets, by_default), indirect=True)


on_every_target = _on([OWN, GENERIC, *ARM], [OWN])
on_own_and_generic = _on([OWN, GENERIC], [OWN])
on_others = pytest.mark.parametrize("target", [GENERIC, *ARM], indirect=True)
