"""Command lines of the package's programs: a parser whose errors name the nearest option.

Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from inflight.log_lines import asks_for_json, error_line
from inflight.version import package_version

_FEW = 8  # choices that an error lists although one of them is near
_UNRECOGNIZED = "unrecognized arguments: "
_SCRIPT = re.compile(r"[ /.]")  # before the name of a program: scripts/serve, inflight serve, inflight.openai


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelled most like `word`; None if none is similar."""
    return next(iter(equally_near(word, known)), None)


def equally_near(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known words with the smallest edit distance to `word`; [] if none is similar.

    Args:
        word: A misspelled word.
        known: The words that it may have been meant to be.
        cutoff: The least similarity, as in `difflib.get_close_matches`.
    """
    close = difflib.get_close_matches(word, list(known), n=5, cutoff=cutoff)
    distances = {each: _edit_distance(word, each) for each in close}
    return [each for each in close if distances[each] == min(distances.values())]


def _edit_distance(one: str, other: str) -> int:
    """Return how many letters must be inserted, deleted, replaced or swapped to turn one word into the other."""
    before, row = [0], list(range(len(other) + 1))
    for index, letter in enumerate(one, 1):
        earlier, before, row = before, row, [index]
        for column, expected in enumerate(other, 1):
            least = min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != expected))
            if index > 1 and column > 1 and (letter, one[index - 2]) == (other[column - 2], expected):
                least = min(least, earlier[column - 2] + 1)
            row.append(least)
    return row[-1]


def program_name(script: str) -> str:
    """Return the name for usage messages: `inflight COMMAND` if that runs the program, otherwise `script`."""
    return sys.argv[0] if sys.argv[0].startswith("inflight ") else script


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, suggests the nearest option, and has --version.

    With `--log-format json` on the command line, errors are written as lines of the JSON log.

    Args:
        other_flags: Flags that the program understands or answers before it parses; they are suggested, too.
        keywords: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, other_flags: Iterable[str] = (), **keywords: object) -> None:
        super().__init__(allow_abbrev=False, **keywords)  # pyright: ignore[reportArgumentType]
        self._other_flags = tuple(other_flags)
        self._given: Sequence[str] = ()
        self.add_argument("--version", action="version", version=f"inflight {package_version()}")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self._given, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not one of the choices, with the nearest ones, and all of them if they are
        few."""
        if action.choices is None or value in action.choices:
            return
        near = equally_near(str(value), map(str, action.choices))
        choices = list(map(str, action.choices))
        hints = [f"did you mean {' or '.join(near)}?"] if near else []
        if not near or len(choices) <= _FEW:
            hints.append(f"choose from {', '.join(choices)}")
        raise argparse.ArgumentError(action, f"got {str(value)!r}; {' '.join(hints)}")

    def error(self, message: str) -> NoReturn:
        """Write the message, with the nearest option, and exit with 2."""
        if message.startswith(_UNRECOGNIZED):
            unknown = [word.partition("=")[0] for word in message.removeprefix(_UNRECOGNIZED).split()]
            flags = (*self._option_string_actions, *self._other_flags)
            known = [flag[2:] for flag in flags if flag.startswith("--")]  # with "--" all would be similar
            near = [equally_near(word[2:], known) for word in unknown if word.startswith("--")]
            found = list(dict.fromkeys(f"--{word}" for words in near for word in words))
            places = [action.metavar or action.dest for action in self._get_positional_actions()]
            if found:
                message += f" (did you mean {' or '.join(found)}?)"
            elif places and not any(word.startswith("-") for word in unknown):
                message += f" (expected one {' and one '.join(map(str, places))})"
        hint = f"{self.prog} --help lists the options"
        if asks_for_json(self._given):
            self.exit(2, error_line(_SCRIPT.split(self.prog)[-1], f"{message}; {hint}"))
        self.exit(2, f"{self.prog}: error: {message}\n{hint}\n")
