"""The version of this package. Standard library only."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def package_version() -> str:
    """Return the version of the installed package, else that of the checkout; "unknown" without either."""
    try:
        return metadata.version("inflight")
    except metadata.PackageNotFoundError:
        pass
    try:
        found = re.search(r'^version = "(.+)"$', _PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"
