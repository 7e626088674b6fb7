"""Hooks of mkdocs that change links and files. mkdocs.yml lists them; they run in .venv-docs.

Files outside of docs/ are not part of the site, so links to them, which work in the repository, are replaced
by the files' paths. The theme's scripts are changed so that they fetch nothing from other hosts.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_FETCHED = re.compile(r"https://(?:unpkg\.com|api\.github\.com)/")
_LINK_OUT_OF_DOCS = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside of docs/ by the files' paths."""
    return _LINK_OUT_OF_DOCS.sub(_as_text, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Remove everything that the theme would fetch from other hosts, and dictionaries of unused search languages.

    The theme would fetch a library for old browsers, a library for diagrams, and statistics of a code host.
    """
    scripts = Path(config["site_dir"]) / "assets" / "javascripts"
    shutil.rmtree(scripts / "lunr")
    for script in scripts.glob("bundle.*.js"):
        text = script.read_text(encoding="utf-8")
        script.write_text(_FETCHED.sub("not-fetched/", text), encoding="utf-8")


def _as_text(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
