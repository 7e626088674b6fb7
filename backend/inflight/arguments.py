"""Command lines of the package's programs: a parser with exact errors, and the types of options.

Standard library only.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from inflight import environment
from inflight.log_lines import asks_for_json, error_line
from inflight.near_words import equally_near
from inflight.version import package_version

_FEW = 8  # choices that an error lists although one of them is near
_UNRECOGNIZED = "unrecognized arguments: "
_REQUIRED = "the following arguments are required: "
_WITHOUT_VALUE = "expected one argument"
_MAX_PORT = 65535
_SCRIPT = re.compile(r"[ /.]")  # before the name of a program: scripts/serve, inflight serve, inflight.openai


def program_name(script: str) -> str:
    """Return the name for usage messages: `inflight COMMAND` if that runs the program, otherwise `script`."""
    return sys.argv[0] if sys.argv[0].startswith("inflight ") else script


def command_of(script: str) -> str:
    """Return what starts another program: `inflight COMMAND` if this one was started so, otherwise `script`."""
    if not sys.argv[0].startswith("inflight "):
        return script
    return f"inflight {Path(script).name.replace('_', '-')}"


def why_not_writable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, or in the nearest existing one above it; None if it can be."""
    try:
        existing = _nearest(folder)
        if not existing.is_dir():
            return f"{existing} is not a folder"
    except OSError as error:  # such as a name that is too long
        return f"{error.strerror}"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"no file can be made in {existing}: {error.strerror}"
    return None


def _nearest(path: Path) -> Path:
    """Return a path, or the nearest one above it that exists and can be seen. A link to nowhere exists."""
    while path != path.parent:
        try:
            os.lstat(path)
            break
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            path = path.parent
    return path


def folder_name(text: str) -> Path:
    """Parse the path of a folder: not "", which would be the current one. A type of options."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a folder, got ''; . is the current folder")
    return Path(text)


def output_folder(text: str) -> Path:
    """Parse the path of a folder to write, which need not exist yet. A type of options."""
    folder = folder_name(text)
    if reason := why_not_writable(folder):
        raise argparse.ArgumentTypeError(f"expected a folder that can be written, got {text!r}: {reason}")
    return folder


def output_file(text: str) -> Path:
    """Parse the path of a file to write, in a folder that exists. A type of options."""
    file = Path(text)
    if file.is_dir():
        reason = "it is a folder"
    elif not file.parent.exists():
        reason = f"there is no folder {file.parent}"
    elif file.exists():
        reason = None if os.access(file, os.W_OK) else "its permissions do not let this user write to it"
    else:
        reason = why_not_writable(file.parent)
    if reason:
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}: {reason}")
    return file


def positive(text: str) -> int:
    """Parse a whole number that is at least 1. A type of options."""
    return _number_from(1, text, "a whole number from 1")


def whole(text: str) -> int:
    """Parse a whole number that is at least 0. A type of options."""
    return _number_from(0, text, "a whole number from 0")


def seconds(text: str) -> int:
    """Parse a whole number of seconds. A type of options."""
    return _number_from(0, text, "a whole number of seconds")


def port(text: str) -> int:
    """Parse a TCP port; 0 means any free one. A type of options."""
    expected = "a port number from 0 to 65535"
    number = _number_from(0, text, expected)
    if number > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number


def _number_from(least: int, text: str, expected: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)


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
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


class Parser(argparse.ArgumentParser):
    """A parser with --version that takes no abbreviations, and whose errors say what was expected.

    The error about an unknown option names the nearest one, and the error about a missing option has an example.
    An invalid environment variable of this package is an error, too. With `--log-format json` on the command line,
    errors are written as lines of the JSON log.

    Args:
        other_flags: Flags that the program understands or answers before it parses; they are suggested, too.
        checks_environment: Whether to refuse invalid environment variables.
        given_as: Flags on the command line, by the options to which they were translated; errors name both.
        keywords: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        other_flags: Iterable[str] = (),
        checks_environment: bool = True,
        given_as: Mapping[str, str] | None = None,
        **keywords: object,
    ) -> None:
        super().__init__(allow_abbrev=False, **keywords)  # pyright: ignore[reportArgumentType]
        self._other_flags = tuple(other_flags)
        self._checks_environment = checks_environment
        self._given_as = dict(given_as or {})
        self._given: Sequence[str] = ()
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.add_argument("--version", action="version", version=f"inflight {package_version()}")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        self._given = sys.argv[1:] if args is None else list(args)
        parsed = super().parse_known_args(self._given, namespace)
        if self._checks_environment and (faults := environment.faults(os.environ)):
            self._refuse("; ".join(faults))
        return parsed

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
        """Write the message, with the nearest option or an example, and exit with 2."""
        if message.startswith(_REQUIRED):
            # The missing option may be misspelled.
            unknown = self._unknown_flags()
            message = (
                f"{_UNRECOGNIZED}{' '.join(unknown)}" if unknown else f"{message}, as in {self._example()}"
            )
        if message.endswith(_WITHOUT_VALUE) and (flag := self._flag_before_dash()):
            message += f"; write {flag}=VALUE if the value begins with a dash"
        if message.startswith(_UNRECOGNIZED):
            message += self._hint(message.removeprefix(_UNRECOGNIZED).split())
        for option, flag in self._given_as.items():
            message = message.replace(f"argument {option}: ", f"argument {flag} (here {option}): ")
        self._refuse(message, f"{self.prog} --help lists the options")

    def _hint(self, unrecognized: list[str]) -> str:
        """Return the options or places that unrecognized words may have been meant for, in parentheses."""
        unknown = [word.partition("=")[0] for word in unrecognized]
        flags = (*self._option_string_actions, *self._other_flags)
        known = [flag[2:] for flag in flags if flag.startswith("--")]  # with "--" all would be similar
        near = [equally_near(word[2:], known) for word in unknown if word.startswith("--")]
        found = list(dict.fromkeys(f"--{word}" for words in near for word in words))
        if found:
            return f" (did you mean {' or '.join(found)}?)"
        places = [action.metavar or action.dest for action in self._get_positional_actions()]
        if places and not any(word.startswith("-") for word in unknown):
            return f" (expected one {' and one '.join(map(str, places))})"
        return ""

    def _unknown_flags(self) -> list[str]:
        words = self._given[: self._given.index("--")] if "--" in self._given else self._given
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        return [flag for flag in flags if flag not in self._option_string_actions]

    def _flag_before_dash(self) -> str | None:
        """Return the first option that takes a value and is followed by a word with a dash; None without one."""
        for flag, word in pairwise(self._given):
            action = self._option_string_actions.get(flag)
            if action is not None and action.nargs != 0 and word.startswith("-"):
                return flag
        return None

    def _example(self) -> str:
        """Return a command line with every required argument."""
        words = [self.prog]
        for action in self._actions:
            if action.required:
                words += [*action.option_strings[-1:], str(action.metavar or action.dest.upper())]
        return " ".join(words)

    def _refuse(self, message: str, hint: str = "") -> NoReturn:
        if asks_for_json(self._given):
            told = f"{message}; {hint}" if hint else message
            self.exit(2, error_line(_SCRIPT.split(self.prog)[-1], told))
        self.exit(2, f"{self.prog}: error: {message}\n{f'{hint}{chr(10)}' if hint else ''}")
