"""A class name has one meaning in the package, also where one class is private."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import inflight

OF_NVIDIA = {"GptManager", "Request", "Response", "SamplingConfig", "TritonPythonModel"}
"""Names that the Executor API and Triton prescribe, beside the package's own."""


def test_no_class_name_has_two_meanings() -> None:
    root = Path(inflight.__file__).parent
    places: dict[str, list[str]] = defaultdict(list)
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(root)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in OF_NVIDIA}
    assert not twice
