"""The documentation's commands that send requests to /v1 run unchanged, on another port."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("index.md", "first-model.md", "from-vllm.md")
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if "localhost:9000/v1" in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_command_gets_an_answer(fake_url, command):
    here = command.replace("http://localhost:9000", fake_url).replace("localhost:9000", fake_url)
    here = here.replace('"model": "tiny"', '"model": "demo"')
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] > 0


def test_the_pages_have_commands():
    assert len(COMMANDS) >= 2
