"""The command that installs an extra of this package, for error messages. Standard library only."""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package, for a checkout or an installed package."""
    if (_CHECKOUT / "pyproject.toml").exists():
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'inflight[{extra}]'"
