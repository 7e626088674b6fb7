"""Steps of a user on the page, and a server's answers, for tests."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Route, expect

CHAT, COMPLETION = "**/v1/chat/completions", "**/v1/completions"


def setting(page: Page, **values: str) -> None:
    """Fill in settings, by the names of their fields."""
    for field, value in values.items():
        page.fill(f"#setting-{field}", value)


def complete(page: Page, prompt: str, **settings: str) -> None:
    """Send a prompt for completion, and wait for the end."""
    page.get_by_text("Completion", exact=True).click()
    setting(page, **settings)
    say(page, prompt)


def say(page: Page, text: str) -> None:
    """Send a text with Enter, and wait for the end of the answer."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    wait_for_end(page)


def wait_for_models(page: Page) -> None:
    """Wait until the list of models is loaded; requests that are sent before name no model."""
    expect(page.locator("#model")).not_to_have_value("")


def wait_for_end(page: Page) -> None:
    """Wait until no request is running."""
    page.wait_for_selector("#send:visible")
    expect(page.locator("[aria-busy]")).to_have_count(0, timeout=30_000)


def texts(page: Page) -> list[str]:
    """Return the texts of the last turn's answers, without their prompts."""
    return page.locator(".log:visible .turn").last.locator(".flow .text").all_text_contents()


def errors(page: Page) -> list[str]:
    """Return the errors that the page shows."""
    return page.locator(".error .message").all_text_contents()


def sent_bodies(page: Page, pattern: str) -> list[dict[str, Any]]:
    """Return a list that later collects the bodies of requests, which are answered with nothing."""
    bodies: list[dict[str, Any]] = []

    def take(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n")

    page.route(pattern, take)
    return bodies


def answer_with(page: Page, pattern: str, *events: dict[str, Any]) -> None:
    """Answer all later requests with these events."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route(pattern, lambda route: route.fulfill(content_type="text/event-stream", body=stream))


def without_stream(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that only the page needs."""
    own = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert own.items() <= body.items()
    return {name: value for name, value in body.items() if name not in own}
