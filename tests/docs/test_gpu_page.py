"""The options of docs/gpu.md select tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.zoo_configs import CASES

ROOT = Path(__file__).parents[2]


def test_every_word_of_an_option_is_in_the_name_of_a_test_or_a_model() -> None:
    tests = (ROOT / "tests/engine/cuda/test_gpu.py").read_text(encoding="utf-8")
    names = [*re.findall(r"^def (test_\w+)", tests, re.MULTILINE), *CASES]
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    options = [one or other for one, other in re.findall(r'`-k (?:"([^"]+)"|(\w+))`', page)]
    assert options
    words = {word for option in options for word in re.findall(r"[\w.-]+", option)} - {"and", "or", "not"}
    assert not [word for word in words if not any(word in name for name in names)]
