"""Debian's Chromium for tests of the playground, driven by playwright, which installs no browser here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser")
_FOLDERS = ("/usr/bin", "/usr/lib/chromium", "/snap/bin")
PATIENCE_MS = 60_000


def find_chromium() -> str:
    """Return the path of an installed Chromium; raise FileNotFoundError, naming the package, without one."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS])
    for name in _NAMES:
        if found := shutil.which(name, path=places):
            return found
    raise FileNotFoundError(
        "the playground's tests need Chromium, and there is none on PATH or in "
        f"{', '.join(_FOLDERS)}: on Debian and Ubuntu, apt-get install chromium"
    )


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Yield a headless Chromium, and close it after the with block."""
    path = find_chromium()
    with sync_playwright() as playwright:
        # Root in a container has no sandbox, and its /dev/shm is small.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()
