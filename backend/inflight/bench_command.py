"""`inflight bench NAME`: finds a program in the package `benchmarks`. Standard library only."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

from inflight.arguments import nearest


def find(arguments: list[str]) -> tuple[str, list[str]] | int:
    """Return the benchmark's module and options; or an exit status, after writing a list or an error."""
    programs = _programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(_usage(programs))
        return 0 if arguments else 2
    name = arguments[0].replace("-", "_")
    if name not in programs:
        near = nearest(name, programs)
        hint = f"; did you mean {near}?" if near else ""
        sys.stderr.write(f"bench: there is no benchmark {arguments[0]}{hint}\n{_usage(programs)}")
        return 2
    return f"benchmarks.{name}", arguments[1:]


def _programs() -> dict[str, str]:
    """Return the first line of each program's docstring, by the program's name."""
    spec = importlib.util.find_spec("benchmarks")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found: dict[str, str] = {}
    for file in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not file.stem.endswith("_program") and '\nif __name__ == "__main__":' in text:
            found[file.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def _usage(programs: dict[str, str]) -> str:
    lines = [f"  {name:16} {purpose}" for name, purpose in programs.items()]
    return "\n".join(["usage: inflight bench NAME [options]; NAME --help lists them", "", *lines, ""])
