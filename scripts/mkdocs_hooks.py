"""Hooks for mkdocs that change links and files besides making HTML; named in mkdocs.yml, run in .venv-docs.

The pages are written to be read in the repository. What they link to outside of docs/ is not part of the site:
such a link becomes the path of the file. The theme's scripts are kept from fetching anything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_FETCHED = re.compile(r"https://(?:unpkg\.com|api\.github\.com)/")
_LINK_OUT_OF_DOCS = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files outside of docs/ as text."""
    return _LINK_OUT_OF_DOCS.sub(_as_text, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Take out of the theme what would be fetched elsewhere, and dictionaries of languages that are not searched.

    The theme would fetch a library for old browsers, another one for diagrams, and numbers of a code host.
    """
    scripts = Path(config["site_dir"]) / "assets" / "javascripts"
    shutil.rmtree(scripts / "lunr")
    for script in scripts.glob("bundle.*.js"):
        text = script.read_text(encoding="utf-8")
        script.write_text(_FETCHED.sub("not-fetched/", text), encoding="utf-8")


def _as_text(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
