"""The code, the table of docs/models.md, and README's list made from it have the same families.

`UPDATE_TABLES=1` rewrites the list. tests/engine/test_every_family.py checks the rest of the table.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from pathlib import Path

from inflight.models import FAMILIES
from inflight.models.families import llama
from inflight.multimodal import MULTIMODAL

_ROOT = Path(__file__).parents[2]
_BEGIN, _END = "<!-- families -->\n\n", "\n\n<!-- end of families -->"


def _architectures() -> list[str]:
    """Return the table's second column."""
    table = (
        (_ROOT / "docs" / "models.md")
        .read_text()
        .split("<!-- table -->")[1]
        .split("<!-- end of table -->")[0]
    )
    return re.findall(r"^\| `\w+` \| `(\w+)` \|", table, re.MULTILINE)


def test_the_table_has_every_family() -> None:
    assert _architectures() == [family.architecture for family in FAMILIES]


def test_readme_lists_the_families_of_the_table() -> None:
    path = _ROOT / "README.md"
    head, rest = path.read_text().split(_BEGIN.rstrip("\n"))
    found, tail = rest.split(_END.lstrip("\n"))
    names = [re.sub("(ForCausalLM|LMHeadModel)$", "", name) for name in _architectures()]
    expected = textwrap.fill(f"{', '.join(names[:-1])} and {names[-1]}.", 120)
    if os.environ.get("UPDATE_TABLES"):
        path.write_text(f"{head}{_BEGIN}{expected}{_END}{tail}")
        found = expected
    assert found.strip() == expected
    num_multimodal = len(MULTIMODAL)
    assert f"| {len(FAMILIES)} families, the text part of {num_multimodal} multimodal ones" in head


def test_the_page_lists_the_multimodal_classes() -> None:
    page = (_ROOT / "docs" / "models.md").read_text().split("## Multimodal models")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \|$", page, re.MULTILINE)
    assert listed == [(each.model_type, each.architecture) for each in MULTIMODAL]


def test_the_shown_family_equals_the_code() -> None:
    page = (_ROOT / "docs" / "models.md").read_text()
    source = inspect.getsource(llama)
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    for piece in shown[1].strip().split("\n\n\n"):
        for part in re.split(r"\n\n(?=Family)", piece):
            assert part in source
