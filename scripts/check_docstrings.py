"""Check that documentation begins with a noun phrase or an imperative, not with a relative clause.

Looks at docstrings, the strings that document assignments, and the entries of `Args:` and `Attributes:`, whose
further lines must be indented. Prints file and line of every refused one. Standard library only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("backend", "tensorrt_llm_shim", "client", "benchmarks", "scripts", "examples", "tests")
"""The folders that are checked by default, relative to the repository's root."""

_RELATIVE = r"what|whatever|those|these|that|whose|who|whom|where|which|why|of"
_REFUSED = re.compile(
    rf"(?:{_RELATIVE}|whether (?:it|they|that|(?:this|these|those) (?:is|are)))\b", re.IGNORECASE
)
# "Whether it …" is fine in an entry: the class or function that the entry belongs to is "it".
_REFUSED_ENTRY = re.compile(rf"(?:{_RELATIVE})\b", re.IGNORECASE)
_SECTION = re.compile(r"( *)(?:Args|Attributes):\s*$")
_ENTRY = re.compile(r"( *)[^\s:][^:]*:\s+(.*)")
_NAMES = re.compile(r" *[\w.*]+(, [\w.*]+)*(:( |$)|,$)")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def refused_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and first line of every refused docstring and entry in a module's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _Documented):
            yield from _refused_in_docstring(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from _refused_below_assignments(node.body)


def _refused_in_docstring(node: _Documented) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    first_line = node.body[0].lineno
    if _REFUSED.match(_without_quotes(docstring)):
        yield first_line, docstring.splitlines()[0]
    for offset, line, description in _entries(docstring):
        if _REFUSED_ENTRY.match(_without_quotes(description)) or not _NAMES.match(line):
            yield first_line + offset, line.strip()


def _refused_below_assignments(statements: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for assignment, statement in pairwise(statements):
        match assignment, statement:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                if _REFUSED.match(_without_quotes(text)):
                    yield statement.lineno, text.splitlines()[0]


def _entries(docstring: str) -> Iterator[tuple[int, str, str]]:
    """Yield offset, line and description of each entry of a docstring's `Args:` and `Attributes:`.

    Other lines that are indented like an entry are yielded with the description "".
    """
    section: int | None = None
    indent = 0
    for offset, line in enumerate(docstring.splitlines()):
        width = len(line) - len(line.lstrip())
        if heading := _SECTION.match(line):
            section, indent = len(heading[1]), 0
        elif section is not None and line.strip():
            if width <= section:
                section = None
                continue
            indent = indent or width
            entry = _ENTRY.match(line)
            if width == indent:
                yield offset, line, entry[2] if entry else ""


def _without_quotes(text: str) -> str:
    return text.lstrip("\"'`([")


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
            f"{found} docstrings or entries do not begin with what the thing is or does:"
            " begin with a noun phrase or an imperative, and indent the further lines of an entry",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
