"""The console command `inflight`, or `python -m inflight`: runs the program of a subcommand.

Imports only the standard library, so that `--help` and `--version` answer at once, also before anything is
installed. A subcommand's program runs in this process, as with `python -m`, and parses its own options.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from inflight.log_lines import asks_for_json, error_line
from inflight.near_words import nearest
from inflight.version import package_version

COMMANDS = {
    "serve": ("inflight.serve_command", "start a server"),
    "doctor": ("inflight.doctor", "check whether this machine can run a server"),
    "batch": ("inflight.openai.batches.command", "send a file of requests to a running server"),
    "bench": ("inflight.bench_command", "run a benchmark; without a name, list the benchmarks"),
    "build": ("inflight.engine.tensorrt.command", "build a TensorRT engine from a checkpoint"),
    "client": ("inflight_client", "ask a running server for text, its state or its adapters"),
    "replay": ("inflight.replay_command", "replay the scheduler's decisions from a trace, without the model"),
    "simulate": (
        "inflight.testing.simulation.simulate",
        "simulate the scheduler and whole servers with random seeds, to find faults",
    ),
    "verify": (
        "inflight.receipts.verify",
        "re-run a receipt's request, and compare the tokens with the receipt's tokens",
    ),
    "convert-lora": (
        "inflight.adapters.convert_lora",
        "convert the LoRA adapter in a PEFT folder to TensorRT-LLM's two files",
    ),
    "make-model": ("inflight.testing.make_model", "write a checkpoint with random weights"),
}
"""Module and purpose of each subcommand."""

_OTHER_WORDS = {"start": "serve", "run": "serve", "chat": "client chat", "generate": "client generate"}
"""The commands that words of other programs stand for."""

EXTRAS = {"matplotlib": "bench", "tritonclient": "kserve"}
"""The extra of this package that installs a package which some commands need."""

_BUNDLED = Path(__file__).parent / "bundled"
_FAILED = 1
_WRONG_USAGE = 2
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        sys.stderr.write(_help())
        return _WRONG_USAGE
    command, *rest = given
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if command in ("-V", "--version"):
        sys.stdout.write(f"inflight {package_version()}\n")
        return 0
    if command not in COMMANDS:
        near = _OTHER_WORDS.get(command) or nearest(command, (*COMMANDS, "--help", "--version"))
        hint = f"did you mean {near}?" if near else "inflight --help lists the commands"
        message = f"there is no command {command}; {hint}"
        sys.stderr.write(error_line("inflight", message) if asks_for_json(rest) else f"inflight: {message}\n")
        return _WRONG_USAGE
    return _run(command, rest)


def _run(command: str, rest: list[str]) -> int:
    """Run a subcommand's program with the options `rest`; return 0, or exit with the program's status.

    Return 130 if Ctrl-C ends the program before it handles signals itself.
    If a package of an extra is not installed, print how to install it and return 1.
    """
    module, _ = COMMANDS[command]
    sys.path.append(str(_BUNDLED))  # for the client and the benchmarks, unless they are installed
    # A package's program is its module __main__.
    sys.argv[:] = [f"inflight {command}", *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        what = f"{package} is not installed: python -m pip install 'inflight[{EXTRAS[package]}]'"
        sys.stderr.write(f"inflight {command}: {what}\n")
        return _FAILED
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: inflight COMMAND [options]; inflight --version",
            "",
            *lines,
            "",
            "inflight COMMAND --help lists a command's options.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
