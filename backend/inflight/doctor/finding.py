"""The finding of a check, its severity, and the command that fixes it. Standard library only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

INSTALL = "scripts/serve (it installs what is missing into .venv)"


class Level(Enum):
    """How a machine is in one respect: as it should be; worse than it could be; such that nothing is served."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
        name: What was looked at.
        level: How it is.
        says: What was found, in words.
        mend: What to do about it, a command if there is one; "" where there is nothing to be done.
    """

    name: str
    level: Level
    says: str
    mend: str = ""


def green(name: str, says: str) -> Finding:
    """It is as it should be."""
    return Finding(name, Level.GREEN, says)


def yellow(name: str, says: str, mend: str) -> Finding:
    """It will do, and could be better."""
    return Finding(name, Level.YELLOW, says, mend)


def red(name: str, says: str, mend: str) -> Finding:
    """A server does not start, or does not serve, as long as this is so."""
    return Finding(name, Level.RED, says, mend)


def examine(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; a missing package or a failure of the check itself is a finding too."""
    try:
        return list(check())
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        if missing == "inflight" or _can_import(missing):
            return [red(name, f"cannot be examined: {error}", INSTALL)]
        return [red(name, f"cannot be examined: the package {missing} is not installed", INSTALL)]
    except Exception as error:  # a check that fails must not hide what the others find
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return [
            red(name, f"the check itself failed: {said}", "this is a defect of the doctor: please report it")
        ]


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among findings; GREEN without any."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.GREEN)


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
