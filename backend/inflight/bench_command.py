"""`inflight bench NAME` and `scripts/bench NAME`: run a program of the package `benchmarks`, or list them.

Standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from inflight.arguments import program_name
from inflight.errors import InflightError
from inflight.near_words import nearest
from inflight.server.errors import ServeError
from inflight.version import package_version


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark with its options, or write the list; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    programs = _programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage(programs))
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"inflight {package_version()}\n")
        return 0
    name = arguments[0].replace("-", "_")
    if name not in programs:
        near = nearest(name, programs)
        hint = f"did you mean {near}?" if near else "expected a name of the list above"
        program = program_name("scripts/bench")
        sys.stderr.write(f"{_usage(programs)}\n{program}: there is no benchmark {arguments[0]}; {hint}\n")
        return 2
    sys.argv[:] = [sys.argv[0], *arguments[1:]]
    # Some benchmarks start processes of their own, which have to find the package, too.
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_folders()[0].parent), *([others] if others else [])])
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except (InflightError, ServeError) as error:
        sys.stderr.write(f"{program_name('scripts/bench')} {arguments[0]}: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        if not {"-h", "--help"} & set(arguments):
            raise
        sys.stdout.write(f"{programs[name]}\n")
        sys.stderr.write(
            f"{program_name('scripts/bench')} {arguments[0]}: the options are listed when the packages of the "
            f"benchmarks are installed ({error}); a run without --help installs them\n"
        )
        return 1
    return 0


def _programs() -> dict[str, str]:
    """Return the first line of each program's docstring, by the program's name."""
    found: dict[str, str] = {}
    for file in sorted(path for folder in _folders() for path in folder.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not file.stem.endswith("_program") and '\nif __name__ == "__main__":' in text:
            found[file.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def _folders() -> list[Path]:
    """Return the folders of the package `benchmarks`; [] if it is not installed."""
    spec = importlib.util.find_spec("benchmarks")
    return list(map(Path, spec.submodule_search_locations or ())) if spec else []


def _usage(programs: dict[str, str]) -> str:
    lines = [f"  {name:16} {purpose}" for name, purpose in programs.items()]
    program = program_name("scripts/bench")
    usage = f"usage: {program} NAME [options]"
    return "\n".join([usage, "", *lines, "", f"{program} NAME --help lists a benchmark's options.", ""])


if __name__ == "__main__":
    sys.exit(main())
