"""The code, the table of docs/models.md and README have the same families.

tests/engine/test_every_family.py checks the rest of the table.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from inflight.models import FAMILIES
from inflight.models.families import llama
from inflight.multimodal import MULTIMODAL
from inflight.pictures.families import MODEL_TYPES

_ROOT = Path(__file__).parents[2]


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


def test_readme_has_the_number_of_families() -> None:
    readme = (_ROOT / "README.md").read_text()
    assert f"[{len(FAMILIES)} families](docs/models.md)" in readme
    assert f"| {len(FAMILIES)} families; {len(MULTIMODAL)} multimodal architectures take text, " in readme
    assert f"take text, and {len(MODEL_TYPES)} of these also take pictures |" in readme


def test_the_page_of_pictures_lists_their_families() -> None:
    section = (_ROOT / "docs" / "pictures.md").read_text().split("## Families")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(MODEL_TYPES)


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
