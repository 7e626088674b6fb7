"""llama.cpp's greedy tokens, from an environment that has llama-cpp-python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_PYTHON = os.environ.get("INFLIGHT_LLAMA_CPP_PYTHON")
"""The environment's interpreter."""

needs_llama_cpp = pytest.mark.skipif(_PYTHON is None, reason="INFLIGHT_LLAMA_CPP_PYTHON names no interpreter")


def llama_cpp_tokens(
    source: Path, prompts: Sequence[Sequence[int]], num_tokens: int, files: Mapping[str, int] | None = None
) -> dict[str, list[list[int]]]:
    """Return, by file, the tokens that follow each prompt.

    Args:
        source: A GGUF file.
        prompts: Token ids.
        num_tokens: Number of tokens for each prompt.
        files: Files that llama.cpp quantizes from `source`, each with llama.cpp's number of its type.
    """
    given = {"source": str(source), "files": dict(files or {}), "num_tokens": num_tokens}
    given["prompts"] = [list(prompt) for prompt in prompts]
    program = Path(__file__).with_name("llama_cpp_program.py")
    done = subprocess.run(
        [str(_PYTHON), str(program), json.dumps(given)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
