"""The finding of a check: its severity, and how to fix the problem. Imports only the standard library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

INSTALL = "scripts/serve (it installs what is missing into .venv)"
_INSTALL_PACKAGE = "install this package again with pip; nvidia-pytriton (--no-deps) has a tritonserver"
CONVERT = "convert it: AutoModelForCausalLM.from_pretrained(A).save_pretrained(B) of transformers"


class Level(Enum):
    """How bad the finding of a check is.

    GREEN: nothing to do. YELLOW: a server works, but not as well as it could. RED: a server cannot serve.
    """

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
        name: Subject of the check.
        level: Severity.
        says: The result, in words.
        mend: How to fix the problem, if possible as a command; "" if there is nothing to fix.
    """

    name: str
    level: Level
    says: str
    mend: str = ""


def green(name: str, says: str) -> Finding:
    """Make a finding of something that is as it should be."""
    return Finding(name, Level.GREEN, says)


def yellow(name: str, says: str, mend: str) -> Finding:
    """Make a finding of something that works, but could be better."""
    return Finding(name, Level.YELLOW, says, _for_this_user(mend))


def red(name: str, says: str, mend: str) -> Finding:
    """Make a finding of something that keeps a server from starting or serving."""
    return Finding(name, Level.RED, says, _for_this_user(mend))


def examine(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check. A missing package, or an error of the check itself, gives a red finding."""
    try:
        return list(check())
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError)  # otherwise a package is there, but broken
        if missing == "inflight" or not is_missing or _can_import(missing):
            return [red(name, f"cannot be examined: {error}", INSTALL)]
        return [red(name, f"cannot be examined: the package {missing} is not installed", INSTALL)]
    except Exception as error:  # a failing check must not hide the findings of the others
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return [
            red(name, f"the check itself failed: {said}", "this is a bug in scripts/doctor: please report it")
        ]


def worst(findings: Iterable[Finding]) -> Level:
    """Return the most severe level of the findings; GREEN without findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.GREEN)


def _for_this_user(mend: str) -> str:
    """Return the mend with the package's commands, such as `inflight serve`, if one of them is running."""
    if not sys.argv[0].startswith("inflight "):
        return mend
    return mend.replace(INSTALL, _INSTALL_PACKAGE).replace("scripts/", "inflight ")


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
