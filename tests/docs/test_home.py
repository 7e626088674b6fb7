"""The site's first page is README, with its links as they lead from docs/; `UPDATE_TABLES=1` writes it."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "docs" / "index.md"


def test_readme_says_into_which_environment_pip_installs():
    commands = re.findall(r"`([^`\n]*pip install[^`]*)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(commands) == 2 and all(command.startswith("ENVIRONMENT/bin/pip ") for command in commands)


def test_the_home_page_is_readme():
    links = re.compile(r"\]\((?!https?:|#)(docs/)?")
    expected = links.sub(
        lambda found: "](" if found[1] else "](../", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    if os.environ.get("UPDATE_TABLES"):
        HOME.write_text(expected, encoding="utf-8")
    assert HOME.read_text(encoding="utf-8") == expected, "UPDATE_TABLES=1 writes it"
