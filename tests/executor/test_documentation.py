"""The Python blocks of README.md and docs/executor.md that need no server run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    block
    for page in ("README.md", "docs/executor.md")
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    if "inflight.executor" in block
]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, r" *\w+"),
        (1, r"1 \[\[1, 2, 3, 4, .*\n2 \[\[1, 2, 3, 4, .*\], \[1, 2, 3, 4, "),
        (2, r".*\(\d+, .*\) \(\d+, .*\)\n(\[\[\d+\]\]\n){5}$"),
    ],
)
def test_a_documented_program_prints_its_result(
    number: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs run in this process; test_examples runs one in a process of its own."""
    assert len(PROGRAMS) == 3
    monkeypatch.chdir(ROOT)
    exec(compile(PROGRAMS[number], f"program {number}", "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert re.match(expected, out, re.S), out


def test_the_first_answer_takes_five_lines() -> None:
    assert len(PROGRAMS[0].split("\n\n")[1].strip().splitlines()) + 1 <= 5
