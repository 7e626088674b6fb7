"""Command lines of the package's programs: a parser whose errors name the nearest option.

Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

from inflight.version import package_version

_UNRECOGNIZED = "unrecognized arguments: "


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelled most like `word`; None if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def program_name(script: str) -> str:
    """Return the name for usage messages: `inflight COMMAND` if that runs the program, otherwise `script`."""
    return sys.argv[0] if sys.argv[0].startswith("inflight ") else script


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations, suggests the nearest option, and has --version."""

    def __init__(self, **keywords: object) -> None:
        super().__init__(allow_abbrev=False, **keywords)  # pyright: ignore[reportArgumentType]
        self.add_argument("--version", action="version", version=f"inflight {package_version()}")

    def error(self, message: str) -> NoReturn:
        """Write the usage and the message, with the nearest option, and exit with 2."""
        if message.startswith(_UNRECOGNIZED):
            unknown = [word.partition("=")[0] for word in message.removeprefix(_UNRECOGNIZED).split()]
            near = [nearest(word, self._option_string_actions) for word in unknown if word.startswith("--")]
            found = list(dict.fromkeys(filter(None, near)))
            if found:
                message += f" (did you mean {' or '.join(found)}?)"
        super().error(message)
