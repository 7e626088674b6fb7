"""The page on a desktop and on a phone, in the light and in the dark theme."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.openai_endpoint.playground.steps import CHAT, answer_with, say, setting
from tests.tiers import with_all

ANSWER = "# Title\n\nText with `code` and [a link](https://a.example)\n\n> quoted\n\n"
ANSWER += "```python\n" + "x" * 200 + "\n```\n\n|" + " wide column |" * 12 + "\n|" + " --- |" * 12 + "\n"
CALL = {"index": 0, "id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}

TOO_WIDE = """
    () => [...document.querySelectorAll("body > *, main *, header *, aside *")]
        .filter((one) => one.checkVisibility() && !one.closest(".table *, pre *") && !one.closest(".unseen"))
        .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
        .map((one) => one.outerHTML.slice(0, 80))
"""

# Texts whose contrast with what is behind them is below the 4.5 that WCAG 2 demands (AA).
TOO_FAINT = """
    () => {
        const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        const paint = (color) => { context.fillStyle = color; context.fillRect(0, 0, 1, 1); };
        const luminance = () => {
            const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
            const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = parts.map(linear);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const contrast = (element) => {
            const behind = [];
            for (let one = element; one; one = one.parentElement) {
                behind.unshift(getComputedStyle(one).backgroundColor);
            }
            paint("white");
            behind.forEach(paint);
            const ground = luminance();
            paint(getComputedStyle(element).color);
            const [darker, lighter] = [ground, luminance()].sort((one, other) => one - other);
            return (lighter + 0.05) / (darker + 0.05);
        };
        const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        return [...document.querySelectorAll("body *")]
            .filter((one) => hasText(one) && one.checkVisibility() && !one.closest(":disabled, .unseen"))
            .filter((one) => contrast(one) < 4.5)
            .map((one) => `${contrast(one).toFixed(1)} ${one.outerHTML.slice(0, 80)}`);
    }
"""


SCREENS = [(1280, "light"), (360, "dark"), (1280, "dark"), (360, "light"), (768, "light"), (768, "dark")]


@pytest.mark.parametrize(("width", "theme"), with_all(SCREENS, SCREENS[:2]))
def test_everything_fits_and_can_be_read(open_page, width: int, theme: str) -> None:
    """Each run begins with the system's theme, and changes to the other by the page's setting."""
    page = open_page(viewport={"width": width, "height": 740}, color_scheme=theme)
    events = [{"content": ANSWER, "reasoning_content": "hm"}, {"tool_calls": [CALL]}]
    answer_with(page, CHAT, *({"choices": [{"index": 0, "delta": delta}]} for delta in events))
    say(page, "x" * 300)
    expect(page.locator("#context")).to_be_visible()
    check(page)
    page.click("#open-library")
    expect(page.locator("#library [data-action=open]")).to_be_in_viewport()
    check(page)
    if width < 1000:
        page.click("#open-settings")
        assert not page.locator("#library").is_visible()
    expect(page.locator("#preset")).to_be_in_viewport()
    setting(page, tools="[", stop="END")
    page.check("#setting-logprobs")
    check(page)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.select_option("#setting-theme", "light" if theme == "dark" else "dark")
    other = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert {ground, other} == {"rgb(250, 249, 247)", "rgb(21, 23, 26)"}
    assert (ground == "rgb(21, 23, 26)") == (theme == "dark")
    check(page)
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == other


def check(page: Page) -> None:
    """Assert that nothing is wider than the screen, and that all texts can be told from what is behind them."""
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate("document.scrollingElement.scrollWidth") <= page.evaluate("innerWidth")
    assert page.evaluate(TOO_FAINT) == []
