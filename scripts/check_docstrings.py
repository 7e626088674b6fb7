"""Check that docstrings begin with what the thing is or does, not with a relative clause.

Prints file:line of every docstring that begins otherwise. Standard library only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("backend", "tensorrt_llm_shim")
"""The folders that are checked where none are given, from the repository's root."""
EXCEPTIONS: tuple[str, ...] = (
    "backend/inflight/core/report/executor_stats.py",
    "backend/inflight/core/request/sampling_config.py",
    "backend/inflight/core/schedule/admission.py",
    "backend/inflight/engine/cpu/",
    "backend/inflight/engine/load",
    "backend/inflight/executor/config.py",
    "backend/inflight/executor/convert.py",
    "backend/inflight/executor/fields.py",
    "backend/inflight/executor/sampling.py",
    "backend/inflight/models/",
    "backend/inflight/openai/playground/",
    "backend/inflight/openai/protocol.py",
    "backend/inflight/openai/sampling.py",
    "backend/inflight/sampling/pipeline.py",
    "backend/inflight/sampling/reference.py",
    "backend/inflight/sampling/top_k_top_p.py",
    "backend/inflight/tensors/input_table.py",
    "backend/inflight/tensors/output_table.py",
    "backend/inflight/tensors/prompt_tables.py",
    "backend/inflight/tensors/text_model_tables.py",
)
"""Beginnings of the paths of files that are not checked yet."""

_REFUSED = re.compile(
    r"(?:what|whatever|those|these|that|whose|who|whom|where|which|why|of"
    r"|whether (?:it|they|that|(?:this|these|those) (?:is|are)))\b",
    re.IGNORECASE,
)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def refused_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The line and the first line of every docstring of a module's text that is refused."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _Documented):
            continue
        docstring = ast.get_docstring(node)
        if docstring and _REFUSED.match(docstring.lstrip("\"'`([")):
            yield node.body[0].lineno, docstring.splitlines()[0]


def main(folders: list[str]) -> int:
    """Check `folders`, and return 1 if a docstring in them is refused."""
    found = 0
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
            if path.startswith(EXCEPTIONS):
                continue
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
