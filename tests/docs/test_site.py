"""Every link of the documentation has a target, and the site has every page; without mkdocs."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    """Return the targets of links, except those on other hosts."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def plain(heading: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip()


def anchors(page: Path) -> tuple[set[str], set[str]]:
    """Return the anchors of a page's headings on a code host, and on the site."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [plain(heading) for heading in HEADING.findall(text)]
    host = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    ascii_only = [unicodedata.normalize("NFKD", each).encode("ascii", "ignore").decode() for each in headings]
    site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in ascii_only}
    return host, site


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), f"{target}: there is no such file"
        if anchor:
            for called in anchors(file):
                assert anchor in called, f"{target}: no heading is called so"


def test_the_documentation_has_links():
    assert sum(len(links(page)) for page in PAGES) > 90
    assert "coming-from-tensorrtllm_backend" in links_with_anchors(ROOT / "README.md")


def links_with_anchors(page: Path) -> set[str]:
    return {target.partition("#")[2] for target in links(page)}


def files(entries: list) -> list[str]:
    """Return the files of the navigation in mkdocs.yml, at any depth."""
    found = []
    for entry in entries:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += files(below) if isinstance(below, list) else [below]
    return found


def test_the_sites_navigation_has_every_page_once():
    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in DOCS], "list it in mkdocs.yml"


def test_the_sites_theme_makes_no_request_to_another_host():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "repo_url"} & set(site)


def test_pages_have_no_pictures_from_other_hosts():
    for page in PAGES:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"!\[[^\]]*\]\([a-z]+:|<(?:img|script|iframe|link)\b[^>]*//", text), page


def test_tools_of_the_site_are_pinned():
    lines = (ROOT / "constraints-docs.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert any(pin.startswith("mkdocs-material==") for pin in pins)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
