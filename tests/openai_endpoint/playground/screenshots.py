"""Takes the pictures of README and docs/playground.md: `python -m tests.openai_endpoint.playground.screenshots`.

The demo checkpoint answers while other clients keep the engine busy. Takes a minute.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import openai
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.openai_endpoint.playground.browser import opened_browser
from tests.openai_endpoint.playground.steps import complete, say, setting
from tests.openai_endpoint.serving import demo_engine, served

FOLDER = Path(__file__).parents[3] / "docs" / "playground"
OTHER_CLIENTS = 3
SETTLE_MS = 10_000  # long enough for a visible line of tokens per second


def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with (
        demo_engine(kernels="torch") as client,
        served(client) as url,
        opened_browser() as browser,
        others(url),
    ):
        chat(opened(browser, url))
        shades(opened(browser, url))
        side_by_side(opened(browser, url, color_scheme="dark"))
        phone(opened(browser, url, viewport={"width": 390, "height": 780}, device_scale_factor=2))


@contextmanager
def others(url: str) -> Iterator[None]:
    """Run some clients that send one request after another."""
    has_ended = Event()

    def ask(seed: int) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            while not has_ended.is_set():
                seed += OTHER_CLIENTS
                client.completions.create(model="demo", prompt="import os\n", max_tokens=300, seed=seed)

    threads = [Thread(target=ask, args=(seed,)) for seed in range(OTHER_CLIENTS)]
    for thread in threads:
        thread.start()
    yield
    has_ended.set()
    for thread in threads:
        thread.join()


def opened(browser: Browser, url: str, **options: Any) -> Page:
    """Return the page after it has shown some of the engine's activity."""
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 780}, **options}).new_page()
    page.goto(url)
    page.wait_for_timeout(SETTLE_MS)
    return page


def chat(page: Page) -> None:
    """Take a chat beside the list of conversations."""
    setting(page, temperature="0.8", seed="2", max_tokens="120", stop="\\n\\n")
    for prompt in ("def parse_args(argv):", "class Queue:"):
        say(page, prompt)
        page.click("#new")
    say(page, "def read_lines(path):")
    say(page, "def copy_file(source, target):")
    page.click("#open-library")
    page.wait_for_timeout(3_000)  # until the line of tokens per second shows the other clients again
    page.locator("#input").blur()
    show_first_settings(page)
    keep(page, "chat")


def shades(page: Page) -> None:
    """Take a chat with shaded tokens and the tooltip of likely tokens."""
    page.check("#setting-logprobs")
    page.check("#setting-monospace")
    setting(page, temperature="0.8", seed="2", max_tokens="120", stop="\\n\\n")
    say(page, "def read_lines(path):")
    say(page, "def copy_file(source, target):")
    page.wait_for_timeout(3_000)  # until the line of tokens per second shows the other clients again
    show_first_settings(page)
    pieces = page.locator(".turn").first.locator(".token")
    surprise = "all => all.map(one => Number(one.style.getPropertyValue('--surprise')))"
    surprises = pieces.evaluate_all(surprise)
    pieces.nth(surprises.index(max(surprises[:8]))).hover()
    keep(page, "shades")


def side_by_side(page: Page) -> None:
    """Take three answers, one of which is chosen, in the dark theme."""
    page.wait_for_selector("#model option", state="attached")
    page.check("#setting-logprobs")
    settings = {"n": "3", "temperature": "0.8", "seed": "1", "max_tokens": "110", "stop": "\\n\\n"}
    complete(page, "def copy_file(source, target):\n", **settings)
    page.get_by_role("button", name="Go on with this").nth(0).click()
    show_first_settings(page)
    keep(page, "side-by-side")


def phone(page: Page) -> None:
    """Take a chat on a small screen."""
    page.click("#open-settings")
    setting(page, temperature="0.8", seed="3", max_tokens="90", stop="\\n\\n")
    page.click("#open-settings")
    say(page, "def read_lines(path):")
    say(page, "def copy_file(source, target):")
    page.locator("#input").blur()
    keep(page, "phone")


def show_first_settings(page: Page) -> None:
    """Scroll the filled panel back to its top."""
    page.locator("#settings").evaluate("panel => (panel.scrollTop = 0)")
    page.wait_for_timeout(300)


def keep(page: Page, name: str) -> None:
    """Write a picture with at most 256 colours."""
    page.wait_for_timeout(1_200)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(FOLDER / f"{name}.png", optimize=True)
    page.context.close()


if __name__ == "__main__":
    main()
