"""Answers in Markdown: their elements, and that no text of a model becomes HTML or leads to code."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.openai_endpoint.playground.steps import CHAT, answer_with, say, texts

ANSWER = """\
# Title

Some **bold**, *slanted* and ~~old~~ text with `code` &lt;here&gt;,
a [link](https://a.example/b "t") and <https://c.example>.

- one
- [x] two
  1. inner

| a | b |
| --- | ---: |
| 1 | `2` |

> quoted

```python
def f(x):
    return x < 1
```

---
"""


def answered(open_page, *texts: str, **options: Any) -> Page:
    """Return a page that shows an answer, streamed in the given parts."""
    page = open_page(**options)
    answer_with(page, CHAT, *({"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts))
    say(page, "Hello")
    return page


def test_markdown_becomes_elements(open_page) -> None:
    halves = ANSWER[: len(ANSWER) // 2], ANSWER[len(ANSWER) // 2 :]
    page = answered(open_page, *halves, permissions=["clipboard-read", "clipboard-write"])
    shown = page.locator(".markdown")
    names = "all => all.map(one => one.localName)"
    assert shown.locator("> *").evaluate_all(names) == [
        "h3", "p", "ul", "div", "blockquote", "figure", "hr"
    ]  # fmt: skip
    assert shown.locator("p").first.inner_text() == (
        "Some bold, slanted and old text with code <here>,\na link and https://c.example."
    )
    assert shown.locator("p *").evaluate_all(names)[:4] == ["strong", "em", "del", "code"]
    assert shown.locator("li").all_inner_texts()[1:] == ["☑ two\ninner", "inner"]
    assert shown.locator("th, td").all_inner_texts() == ["a", "b", "1", "2"]
    links = shown.locator("a").evaluate_all("all => all.map(one => [one.href, one.target, one.rel])")
    assert links == [
        [address, "_blank", "noopener noreferrer"]
        for address in ("https://a.example/b", "https://c.example/")
    ]
    assert shown.locator("figcaption .language").inner_text() == "python"
    assert shown.locator("pre code").text_content() == "def f(x):\n    return x < 1"
    page.locator(".code-block").get_by_role("button", name="Copy").click()
    expect(page.locator("#toast")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x < 1"
    assert texts(page) == [ANSWER]
    page.uncheck("#setting-markdown")
    assert not shown.is_visible() and page.locator(".flow .text").is_visible()


EVIL = [
    "<script>window.ran = true</script>",
    "<img src=x onerror='window.ran = true'>\n\n<svg onload='window.ran = true'></svg>",
    "[click](javascript:window.ran=true) [b](JaVaScRiPt:window.ran=true) [c](java\tscript:window.ran=true)",
    "[d](data:text/html,<script>window.ran=true</script>) [e](vbscript:x) [f](&#106;avascript:window.ran=true)",
    "![g](javascript:window.ran=true) ![h](https://evil.example/track.png) <javascript:window.ran=true>",
    "[i]\n\n[i]: javascript:window.ran=true '<b onmouseover=window.ran=true>'",
    "```<img src=x onerror=window.ran=true>\n</code></pre><script>window.ran = true</script>\n```",
    "| <img src=x onerror='window.ran=true'> |\n| --- |\n| <iframe srcdoc='<script>'> |",
    "<a href='javascript:window.ran=true'>j</a> <details open ontoggle='window.ran=true'> <math><style>",
    '[k](https://a.example/"onmouseover="window.ran=true) `</code><script>window.ran=true</script>`',
    "<div\n\n<style>* { display: none }</style>\n\n<form action=https://evil.example><input name=q></form>",
]
ALLOWED = {
    "p",
    "h3",
    "br",
    "code",
    "pre",
    "figure",
    "figcaption",
    "span",
    "button",
    "div",
    "table",
    "tr",
    "th",
    "td",
    "a",
}


def test_no_text_of_a_model_becomes_html_or_a_dangerous_link(open_page) -> None:
    asked: list[str] = []
    page = open_page(before=lambda page: page.on("request", lambda request: asked.append(request.url)))
    asked.clear()
    for evil in EVIL:
        page.unroute(CHAT)
        answer_with(page, CHAT, {"choices": [{"index": 0, "delta": {"content": evil}}]})
        say(page, "Hello")
    inside = page.locator(".markdown *")
    assert set(inside.evaluate_all("all => all.map(one => one.localName)")) <= ALLOWED
    attributes = inside.evaluate_all("all => all.flatMap(one => one.getAttributeNames())")
    assert {*attributes} <= {"href", "target", "rel", "title", "class", "type", "tabindex", "align"}
    for link in page.locator(".markdown a").all():
        assert (link.get_attribute("href") or "").startswith("https://")
    for button in page.locator(".markdown *").all()[:40]:
        button.dispatch_event("mouseover")
    assert page.evaluate("window.ran") is None
    assert [url for url in asked if "evil" in url or "track" in url] == []
    shown = "\n".join(page.locator(".markdown").all_text_contents())
    for text in ("<script>window.ran = true</script>", "<svg onload=", "<iframe srcdoc=", "<details open"):
        assert text in shown


BARE_CODE = "    if not argv:\n        return *args\n\ndef _g():\n    # no heading\n    return __name__"
NO_BARE_CODE = [
    "- a list\n    - with parts\n    - and more",
    "Text\n\n    code\n\nText\n\nText",
    "    x = 1\n```\n    y\n```",
]


def test_code_without_a_fence_is_shown_as_code_and_what_is_nested_too_deeply_as_it_is(open_page) -> None:
    page = answered(open_page, BARE_CODE)
    assert page.locator(".markdown code").text_content() == BARE_CODE
    nested = ">" * 20_000 + "end"
    for text in [*NO_BARE_CODE, nested]:
        page.unroute(CHAT)
        answer_with(page, CHAT, {"choices": [{"index": 0, "delta": {"content": text}}]})
        say(page, "Hello")
        assert page.locator(".markdown").last.locator("> figure:only-child").count() == 0
    assert page.locator(".markdown").last.text_content() == nested
