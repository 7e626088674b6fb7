"""The check of a built site finds what a browser would fetch from other hosts, and ignores links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "check_site.py"
GOOD = """<html><head><link rel="stylesheet" href="a.css"><link rel="canonical" href="https://docs.example/">
<script src="a.js"></script></head>
<body><a href="https://other.example/">read</a><img src="a.png"></body></html>"""


def check(site: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (site / name).write_text(text)
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(site)], capture_output=True, text=True, timeout=30
    )


def test_links_for_readers_and_comments_are_not_requests(tmp_path):
    scripts = "/*! https://license.example/ */ fetch('search.json')"
    done = check(tmp_path, {"index.html": GOOD, "a.css": "a{background:url(b.png)}", "a.js": scripts})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.html", GOOD.replace('src="a.js"', 'src="https://cdn.example/a.js"')),
        ("index.html", GOOD.replace('src="a.png"', 'src="//cdn.example/a.png"')),
        ("index.html", GOOD.replace('href="a.css"', 'href="https://fonts.example/css"')),
        ("index.html", GOOD.replace("<body>", "<style>@import 'https://fonts.example/a.css'</style>")),
        ("index.html", GOOD.replace("<body>", "<body style=\"background: url('https://cdn.example/b')\">")),
        ("a.css", "@font-face{src:url(https://fonts.example/f.woff2)}"),
        ("a.js", 'load("https://cdn.example/shim.js")'),
    ],
)
def test_requests_to_other_hosts_are_found(tmp_path, name, text):
    done = check(tmp_path, {"index.html": GOOD, name: text})
    assert done.returncode == 1 and "example" in done.stderr and name in done.stderr


def test_a_missing_site_is_an_error(tmp_path):
    done = check(tmp_path, {})
    assert done.returncode == 2 and "there is no site" in done.stderr
