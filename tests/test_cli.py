"""The console command `inflight`: its subcommands, and its answers to wrong usage."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from inflight import cli, version
from inflight.near_words import equally_near
from inflight.server.repository import default_repository
from inflight.version import package_version
from tests.docs.test_flags_page import parser_of

ROOT = Path(__file__).parents[1]


def test_help_lists_every_command_and_imports_no_dependency(tmp_path: Path) -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'backend')!r}); "
    program = path + "from inflight.cli import main; sys.exit(main(['--help']))"
    command = [
        sys.executable,
        "-S",
        "-E",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT / 'backend')!r}); {program}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("module", ["inflight.__main__", "inflight.serve_command"])
def test_an_interrupt_during_the_first_import_prints_nothing(module: str) -> None:
    program = f"""
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("inflight.") and name != {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["inflight", "serve", "--no-triton"]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_benchmarks_are_listed_anywhere(tmp_path: Path) -> None:
    """As installed from a wheel, where only the package is on Python's path."""
    command = [sys.executable, "-S", "-m", "inflight", "bench", "--help"]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT / "backend")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  offline " in done.stdout


def test_every_command_has_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(cli.__file__).parent / "bundled"))
    assert all(importlib.util.find_spec(module) for module, _ in cli.COMMANDS.values())


@pytest.mark.parametrize(
    ("arguments", "package"),
    [("bench soak", "tritonclient"), ("bench profile", "matplotlib")],
)
def test_a_missing_package_is_named_with_its_extra(arguments: str, package: str) -> None:
    """`None` in `sys.modules` makes an import fail as if the package were not installed."""
    program = (
        f"import sys; sys.modules[{package!r}] = None; "
        f"from inflight.cli import main; sys.exit(main({arguments.split()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        f"inflight bench: {package} is not installed: python -m pip install 'inflight[{cli.EXTRAS[package]}]'\n"
    )


def test_extras_install_the_packages_that_are_named() -> None:
    requirements = [each for each in metadata.requires("inflight") or [] if "extra ==" in each]
    for package, extra in cli.EXTRAS.items():
        assert any(each.startswith(package) and f'"{extra}"' in each for each in requirements), package


def test_a_simulation_needs_no_mpi() -> None:
    """As in an environment with the package but without its extras."""
    program = (
        "import sys; sys.modules['mpi4py'] = None; from inflight.testing.machine import ranked_server; "
        "ranked_server.run(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_wrong_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["srve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "command"), [("run", "serve"), ("chat", "client chat")])
def test_a_command_of_another_program_is_answered_with_ours(
    word: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    assert capsys.readouterr().err == f"inflight: there is no command {word}; did you mean {command}?\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tool-call-parser", "llama3"], "got 'llama3'; did you mean llama3_json?\n"),
        (
            ["--dtype", "int4"],
            "got 'int4'; did you mean int8? choose from float32, bfloat16, float16, int8, fp8\n",
        ),
        (["--log-format", "xml"], "got 'xml'; choose from text, json\n"),
        (["one", "two"], "unrecognized arguments: two (expected one DIR_OR_HF_ID)\n"),
        (
            ["--mpirun-arguments", "--oversubscribe"],
            "expected one argument; write --mpirun-arguments=VALUE if the value begins with a dash\n",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_those_that_may_be_there(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from inflight.server.cli import parse

    with pytest.raises(SystemExit):
        parse(given)
    assert said in capsys.readouterr().err


def test_a_wrong_option_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    from inflight.server.cli import parse

    with pytest.raises(SystemExit):
        parse(["--modl=x"])
    assert "unrecognized arguments: --modl=x (did you mean --model or --mode?)" in capsys.readouterr().err


def test_all_options_that_are_equally_near_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from inflight.server.cli import parse

    with pytest.raises(SystemExit):
        parse(["--modle=x"])
    assert "(did you mean --mode or --model?)" in capsys.readouterr().err


def test_an_option_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    from inflight.server.cli import parse

    with pytest.raises(SystemExit):
        parse(["--demo"])
    assert "error: unrecognized arguments: --demo\n" in capsys.readouterr().err


JSON_PROGRAMS = {
    "serve": "inflight.server.cli",
    "openai": "inflight.openai.__main__",
    "pictures": "inflight.pictures.__main__",
    "doctor": "inflight.doctor.__main__",
    "verify": "inflight.receipts.verify",
}


@pytest.mark.parametrize("source", JSON_PROGRAMS)
@pytest.mark.parametrize("option", [["--log-format", "json"], ["--log-format=json"]])
def test_wrong_usage_is_a_line_of_the_json_log(
    source: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        importlib.import_module(JSON_PROGRAMS[source]).main([*option, "--prt", "1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status.value.code == 2
    written = json.loads(line)
    assert written.pop("time")
    assert "--help lists the options" in written.pop("message")
    assert written == {"level": "error", "source": source}


def test_a_wrong_command_is_a_line_of_the_json_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["srve", "--log_format", "json"]) == 2
    written = json.loads(capsys.readouterr().err)
    assert (written["source"], written["message"]) == (
        "inflight",
        "there is no command srve; did you mean serve?",
    )


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("max_batch_sizes", ["max_batch_size"]),
        ("max_sise", ["max_size"]),
        ("max_ize", ["max_size"]),
        ("temperature_", ["temperature_a", "temperature_b"]),
        ("max_isze", ["max_size"]),
        ("else", []),
    ],
)
def test_only_the_nearest_words_are_named(word: str, near: list[str]) -> None:
    known = [
        "max_beam_width",
        "max_size",
        "max_batch_size",
        "max_queue_size",
        "temperature_a",
        "temperature_b",
    ]
    assert sorted(equally_near(word, known)) == near


@pytest.mark.parametrize(
    ("word", "known"),
    [("enable-prompt-embeds", "enable-log-requests"), ("enable_receipts", "eagle_choices")],
)
def test_a_word_that_would_change_by_more_than_a_third_is_not_named(word: str, known: str) -> None:
    assert not equally_near(word, [known], cutoff=0.5)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"inflight {package_version()}\n"


def test_the_version_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    installed = package_version()
    monkeypatch.setattr(metadata, "version", missing)
    assert package_version() == installed
    monkeypatch.setattr(version, "_PROJECT", Path("/nowhere"))
    assert package_version() == "unknown"


def test_the_package_contains_the_repositorys_models() -> None:
    assert default_repository() == ROOT / "model_repository"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_command_needs_no_installation(command: str) -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'backend')!r}); "
    program = path + f"from inflight.cli import main; main([{command!r}, '--help'])"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: inflight {command}")


def test_the_client_names_what_it_lacks(tmp_path: Path) -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'backend')!r}); "
    program = path + "from inflight.cli import main; main(['client', 'state'])"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: tritonclient is missing: pip install 'inflight[kserve]'\n",
    )


def refusal_of(command: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the first line that a command writes about a command line; the status must be 2."""
    with pytest.raises(SystemExit) as status:
        parser_of(command).parse_args(given)
    written = capsys.readouterr().err
    assert status.value.code == 2 and written.count("\n") == 2, written
    return written.partition("\n")[0]


def long_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings[-1:] and action.dest != "help"]


def is_number(parser: argparse.ArgumentParser, action: argparse.Action) -> bool:
    """Whether an option's value is converted to a number."""
    try:
        return isinstance(parser._get_values(action, ["1"]), (int, float))
    except argparse.ArgumentError:
        return False


WITH_FLAGS = [command for command in cli.COMMANDS if command not in ("bench", "client")]


@pytest.mark.parametrize("command", WITH_FLAGS)
def test_every_commands_misspelled_option_is_answered_with_the_right_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if required arguments are missing, since the option may be one of them."""
    for action in long_flags(parser_of(command)):
        flag = action.option_strings[-1]
        said = refusal_of(command, [f"{flag}x=1"], capsys)
        assert f"unrecognized arguments: {flag}x" in said and f"did you mean {flag}" in said


@pytest.mark.parametrize("command", WITH_FLAGS)
@pytest.mark.parametrize("value", ["ten", "nan", ""])
def test_every_number_of_every_command_says_what_it_expects(
    command: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command)
    for action in long_flags(parser):
        flag = action.option_strings[-1]
        if action.nargs == 0 or not is_number(parser, action):
            continue
        said = refusal_of(command, [f"{flag}={value}"], capsys)
        assert f"argument {'/'.join(action.option_strings)}: " in said
        assert "expected" in said and repr(value) in said


@pytest.mark.parametrize(
    ("command", "given", "example"),
    [
        ("build", [], "--model, --output, as in inflight build --model DIR --output DIR"),
        ("make-model", [], "--out, as in inflight make-model --out DIR"),
        ("verify", [], "RECEIPT, as in inflight verify RECEIPT"),
        ("convert-lora", ["a"], "OUT, as in inflight convert-lora PEFT_FOLDER OUT"),
    ],
)
def test_a_missing_argument_is_answered_with_an_example(
    command: str, given: list[str], example: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"inflight {command}"])
    said = refusal_of(command, given, capsys)
    assert said.endswith(f"error: the following arguments are required: {example}")


@pytest.mark.parametrize(
    ("command", "given", "named"),
    [
        ("make-model", ["--out", "PATH"], "--out"),
        ("build", ["--model", "x", "--output", "PATH"], "--output"),
        ("convert-lora", ["x", "PATH"], "OUT"),
        ("batch", ["x", "--output", "PATH"], "-o/--output"),
        ("serve", ["--response-store", "PATH"], "--response-store"),
    ],
)
@pytest.mark.parametrize("path", ["/proc/x", "file/x"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    command: str, given: list[str], named: str, path: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    said = refusal_of(command, [path if word == "PATH" else word for word in given], capsys)
    assert f"argument {named}: expected a f" in said and f"that can be written, got '{path}': " in said
    assert said.endswith(("file is not a folder", "no file can be made in /proc: No such file or directory"))


@pytest.mark.parametrize("command", ["serve", "verify", "batch"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "INFLIGHT_API_KEYS",
            "secret",
            "no environment variable INFLIGHT_API_KEYS; did you mean INFLIGHT_API_KEY?",
        ),
        (
            "INFLIGHT_CPU_BUILD",
            "native",
            "environment variable INFLIGHT_CPU_BUILD is 'native', expected local",
        ),
    ],
)
def test_a_wrong_environment_variable_is_an_error_of_every_command(
    command: str, name: str, value: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as status:
        parser_of(command).parse_args(["a_receipt_or_file"] if command != "serve" else [])
    written = capsys.readouterr().err
    assert status.value.code == 2 and said in written and "secret" not in written


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["inflight"])
    monkeypatch.setattr(cli.runpy, "run_module", interrupt)
    assert cli.main(["serve"]) == 130
