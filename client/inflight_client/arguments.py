"""The parser of the command line: its errors say what came and what was expected. Standard library only."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_REQUIRED = ("the following arguments are required: ", "one of the arguments ")


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


class Parser(argparse.ArgumentParser):
    """A parser, also of each subcommand, that takes no abbreviations and answers an error with one line.

    The line names the nearest option or command for an unknown one, and has an example if an argument is missing.

    Args:
        example: Arguments of an example, as they are typed after the command's name.
        keywords: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, example: str = "", **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)
        self._example = example
        self._given: Sequence[str] = ()
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        self._given = sys.argv[1:] if args is None else args
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        if action.nargs == argparse.PARSER and self._given[0].startswith("-"):
            hint = f"options come after the command, but {self._given[0]} is before it; "
        raise argparse.ArgumentError(action, f"got {str(value)!r}; {hint}choose from {', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        """Write the message, with an example if an argument is missing, and exit with 2."""
        if message.startswith(_REQUIRED):
            flags = [word.partition("=")[0] for word in self._given if word.startswith("--")]
            if unknown := [flag for flag in flags if flag not in self._option_string_actions]:
                self._refuse_unknown(unknown)  # the missing option may be misspelled
            message += f", as in: {self.prog} {self._example}" if self._example else ""
        self._end(message)

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        named = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        near = [found for word in named for found in difflib.get_close_matches(word, flags, n=1)]
        hint = f" (did you mean {' or '.join(dict.fromkeys(near))}?)" if near else ""
        self._end(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _end(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")
