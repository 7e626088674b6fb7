"""Types of command-line options, as functions for argparse, and options of several programs.

Standard library only, see `trtllm_launcher`.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from inflight.hub import EXPECTED_MODEL
from inflight.parameter_spec import ParameterKind
from inflight.server.errors import OptionError

_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def add_checkpoint(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the options that choose a checkpoint: --model or its position (`choose_model`), --revision, --dtype.

    `help`: what the program does with the model.
    """
    add = parser.add_argument
    add("positional_model", nargs="?", metavar="DIR_OR_HF_ID", help="the same as --model")
    add("--model", metavar="DIR_OR_HF_ID", help=help)
    add(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a --model that is fetched from the Hugging Face hub (default: main)",
    )
    add("--dtype", choices=_DTYPES, help="data type of the weights (default: the checkpoint's)")


def choose_model(given: argparse.Namespace) -> None:
    """Take the model from its position if --model does not name it. Raises OptionError if both do, or it is ""."""
    if given.positional_model is not None:
        if given.model is not None:
            raise OptionError(
                f"--model {given.model} and {given.positional_model} name a model: use only one"
            )
        given.model = given.positional_model
    if given.model is not None and not given.model.strip():
        raise OptionError(f"--model got {given.model!r}, expected {EXPECTED_MODEL}")


def find_model_behind(given: argparse.Namespace, *flags: str) -> None:
    """Take the model from the end of a flag with several values, as in `--served-model-name llama MODEL`.

    argparse gives such a flag all words that follow, also the model's. Raises OptionError if it cannot be told
    whether the last word is the model.

    Args:
        given: The parsed command line; unchanged if it names a model elsewhere.
        flags: Names of these flags, as attributes of `given`. The values of api_key are secrets.
    """
    if given.model is not None or given.positional_model is not None or given.engine_dir is not None:
        return
    for name in flags:
        values: list[str] = getattr(given, name)
        if len(values) < 2:
            continue
        last, has_slash = Path(values[-1]).expanduser(), "/" in values[-1]
        is_file = last.suffix == ".gguf" or (last / "config.json").is_file()
        if is_file or (has_slash and name != "api_key"):
            given.positional_model = values.pop()
            return
        if has_slash:
            raise OptionError(
                "--api-key takes all words that follow it: put the model before it, or after --model"
            )


def setting(text: str) -> tuple[str, str]:
    """Parse a key and a value, written KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def value_of(kind: ParameterKind) -> Callable[[str], str]:
    """Return a type that checks the text of a parameter's value, and returns it as it is."""

    def check(text: str) -> str:
        try:
            kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {kind.expectation(text)}") from None
        return text

    return check


def named_folder(text: str) -> tuple[str, Path]:
    """Parse a name and a folder, written NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def size(text: str) -> int:
    """Parse a number of bytes, at least 1: a whole number, and possibly K, M, G or T for powers of 1024."""
    found = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", text, re.IGNORECASE | re.ASCII)
    number = 0 if found is None else int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")
    if not number:
        raise argparse.ArgumentTypeError(f"expected a size such as 500M or 20G, got {text!r}")
    return number
