"""Check that docstrings begin with a noun phrase or an imperative, not with a relative clause.

Prints file and line of every docstring that does not. Imports only the standard library.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("backend", "tensorrt_llm_shim", "client", "benchmarks", "scripts", "examples", "tests")
"""The folders that are checked by default, relative to the repository's root."""

_REFUSED = re.compile(
    r"(?:what|whatever|those|these|that|whose|who|whom|where|which|why|of"
    r"|whether (?:it|they|that|(?:this|these|those) (?:is|are)))\b",
    re.IGNORECASE,
)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def refused_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and first line of every refused docstring in a module's text."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _Documented):
            continue
        docstring = ast.get_docstring(node)
        if docstring and _REFUSED.match(docstring.lstrip("\"'`([")):
            yield node.body[0].lineno, docstring.splitlines()[0]


def main(folders: list[str]) -> int:
    """Check `folders`; return 1 if any docstring is refused."""
    found = 0
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
            for line, beginning in sorted(refused_docstrings(file.read_text(encoding="utf-8"))):
                found += 1
                print(f"{path}:{line}: {beginning}", file=sys.stderr)
    if found:
        print(
            f"{found} docstrings do not begin with what the thing is or does:"
            " begin with a noun phrase or an imperative",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
