"""docs/flags.md lists every flag of the commands, as their parsers declare them; `UPDATE_TABLES=1` writes it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from inflight import bench_command
from inflight.cli import COMMANDS
from inflight.parameter_names import OTHER_NAMES
from inflight.server.option_parser import make_parser
from inflight.triton.reference_pages import fill_in
from inflight.triton.settings_page import GROUPS, mark_names, mark_values

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flags.md"
PARAMETERS = {names.flag: key for key, names in OTHER_NAMES.items() if names.flag}
"""The setting that a flag of `inflight serve` sets."""
OF_VLLM = {
    **{flag: OTHER_NAMES[key].vllm for flag, key in PARAMETERS.items()},
    **{
        flag: flag for flag in ("--revision", "--host", "--served-model-name", "--chat-template", "--api-key")
    },
    **{flag: flag for flag in ("--tool-call-parser", "--reasoning-parser", "--convert", "--allowed-origins")},
    **{flag: flag for flag in ("--ssl-certfile", "--ssl-keyfile")},
    "--port": "--port",
    "--default-max-tokens": "--override-generation-config",
    "--log-format": "VLLM_LOGGING_CONFIG_PATH",
    "--no-access-log": "--disable-uvicorn-access-log",
}
"""vLLM's flag or environment variable, by the flag of `inflight serve`."""
PORTS = {
    "--http-port": "port of Triton's HTTP endpoint",
    "--grpc-port": "port of Triton's gRPC endpoint",
    "--metrics-port": "port of Triton's metrics page",
    "--openai-port": "port of `/v1` and the playground",
}
"""The meaning of flags whose help has only their default."""
DEFAULT = re.compile(r"[ .]*\(default: (.*)\)$|^default: ([^;]*)(?:; )?")


class _Parser(Exception):
    """Carries the parser of a program that was about to parse its command line."""


def parser_of(command: str) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(parser)

    module, _ = COMMANDS[command]
    program = importlib.import_module(module)
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"{module}.__main__")
    with (
        mock.patch.object(sys, "argv", sys.argv[:1]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        pytest.raises(_Parser) as found,
    ):
        program.main()
    return found.value.args[0]


def flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return a parser's flags and positional arguments, without --help, --version and subcommands."""
    hidden = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
    return [each for each in parser._actions if not isinstance(each, hidden)]


def plain(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("*", "\\*")


def spelled(action: argparse.Action) -> str:
    """Return an argument as it is written, such as `--http-port PORT`."""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper()).replace("|", "\\|")
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs == "+":
        value += " ..."
    *others, last = action.option_strings or [""]
    return ", ".join([*(f"`{each}`" for each in others), f"`{f'{last} {value}'.strip()}`"])


def described(action: argparse.Action, meanings: dict[str, str]) -> tuple[str, str]:
    """Return an argument's meaning and its default."""
    text = (action.help or "") % {**vars(action), "default": action.default}
    found = DEFAULT.search(text)
    default = next(filter(None, found.groups()), "") if found else ""
    meaning = DEFAULT.sub("", text)
    known = next((meanings[flag] for flag in action.option_strings if flag in meanings), "")
    whole = "; ".join(filter(None, (plain(known), mark_values(plain(meaning)))))
    return mark_names(whole), mark_names(plain(default))


def serve_table() -> Iterator[str]:
    yield "| flag | meaning | default | setting | vLLM |"
    yield "|---|---|---|---|---|"
    for action in flags(make_parser()):
        names = action.option_strings
        keys = [
            f"[`{PARAMETERS[flag]}`](settings.md#{PARAMETERS[flag]})" for flag in names if flag in PARAMETERS
        ]
        theirs = [f"`{each}`" for flag in names for each in OF_VLLM.get(flag, "").split(", ") if each]
        meaning, default = described(action, PORTS)
        yield f"| {spelled(action)} | {meaning} | {default} | {''.join(keys)} | {', '.join(theirs)} |"


def short_table(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "| flag | meaning | default |"
    yield "|---|---|---|"
    for action in flags(parser):
        meaning, default = described(action, PORTS)
        yield f"| {spelled(action)} | {meaning} | {default} |"


def client_table() -> Iterator[str]:
    (commands,) = [
        each for each in parser_of("client")._actions if isinstance(each, argparse._SubParsersAction)
    ]
    yield "| command | purpose | arguments |"
    yield "|---|---|---|"
    for choice in commands._choices_actions:
        arguments = ", ".join(spelled(each) for each in flags(commands.choices[choice.dest]))
        yield f"| `{choice.dest}` | {plain(choice.help or '')} | {arguments} |"


def bench_table(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    bench_command.main(["--help"])
    yield "| name | purpose |"
    yield "|---|---|"
    for name, purpose in re.findall(r"^  (\w+) +(.+)$", capsys.readouterr().out, re.MULTILINE):
        yield f"| `{name}` | {plain(purpose)} |"


def tables(capsys: pytest.CaptureFixture[str]) -> str:
    parts = ["## serve", "", *serve_table()]
    for command, (_, purpose) in COMMANDS.items():
        if command == "serve":
            continue
        parts += ["", f"## {command}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        if command == "client":
            parts += client_table()
        elif command == "bench":
            parts += bench_table(capsys)
        else:
            parts += short_table(parser_of(command))
    return "\n".join(parts)


def test_the_page_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    expected = fill_in(PAGE.read_text(encoding="utf-8"), tables(capsys))
    if os.environ.get("UPDATE_TABLES"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected, "UPDATE_TABLES=1 writes it"


def test_flags_of_the_page_have_a_meaning_and_settings_of_the_reference() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 90
    assert set(PARAMETERS.values()) <= {key for keys in GROUPS.values() for key in keys}
    known = {flag for action in flags(make_parser()) for flag in action.option_strings}
    assert {*OF_VLLM, *PORTS} <= known, "a flag of the tables above is gone"
