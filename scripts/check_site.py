"""Check that no page, style or script of a built site makes a browser contact another host.

Links that readers click may lead to other hosts. Imports only the standard library.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_OTHER_HOST = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?((?:[a-z]+:)?//[^'\")\s]+)", re.IGNORECASE)
_NO_REQUEST = {"a", "area"}
_LINKS_WITHOUT_REQUEST = {"canonical", "next", "prev", "alternate", "author", "license"}
_URL_ATTRIBUTES = {"src", "href", "srcset", "data", "poster", "action", "formaction", "ping"}
_IN_SCRIPTS = re.compile(r"https?://[\w.-]+\.[a-z]{2,}[^\s\"'`\\)]*")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_MESSAGES = {"https://bit.ly/2s3ChXG"}
"""URLs in messages of the theme's scripts, which browsers do not fetch."""


class _Page(HTMLParser):
    """Collects the URLs that a browser fetches for a page, including those in its styles and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._inside = tag if tag in ("style", "script") else ""
        self.fetched += _IN_STYLES.findall(given.get("style", ""))
        if tag in _NO_REQUEST or (
            tag == "link" and set(given.get("rel", "").split()) & _LINKS_WITHOUT_REQUEST
        ):
            return
        urls = [given[name] for name in _URL_ATTRIBUTES & set(given)]
        self.fetched += [url for url in urls if _OTHER_HOST.match(url)]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.fetched += _IN_STYLES.findall(data)


def requests_to_other_hosts(site: Path) -> list[str]:
    """List the URLs on other hosts that browsers would fetch, each with the file that has it."""
    found: list[str] = []
    for file in sorted(site.rglob("*")):
        if file.suffix == ".html":
            page = _Page()
            page.feed(file.read_text(encoding="utf-8"))
            urls = page.fetched
        elif file.suffix == ".css":
            urls = _IN_STYLES.findall(file.read_text(encoding="utf-8"))
        elif file.suffix == ".js":
            urls = _IN_SCRIPTS.findall(_COMMENT.sub("", file.read_text(encoding="utf-8")))
            urls = [url for url in urls if url not in _MESSAGES]
        else:
            continue
        found += [f"{file.relative_to(site)}: {url}" for url in urls]
    return found


def main(site: Path) -> int:
    """Return 0 if the site contacts no other host."""
    if not (site / "index.html").is_file():
        print(f"{site}: there is no site", file=sys.stderr)
        return 2
    found = requests_to_other_hosts(site)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{site}: {'no' if not found else len(found)} requests to other hosts", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
