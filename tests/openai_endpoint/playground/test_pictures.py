"""Pictures of a chat: dropped, pasted and chosen; shown, sent, kept, and refused with a reason."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from inflight.openai.protocol import ChatBody
from tests.openai_endpoint.playground.steps import (
    CHAT,
    COMPLETION,
    say,
    sent_bodies,
    wait_for_end,
    wait_for_models,
)


def png(grey: int = 128) -> bytes:
    """Return a picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes([0, grey]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def url_of(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def part(picture: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(picture)}}


def with_pictures(page: Page, most: int = 1000) -> None:
    """Have the page told that the model takes pictures."""
    told = {"has_chat_template": True, "reason": "", "max_picture_bytes": most}

    def answer(route: Route) -> None:
        route.fulfill(json=told)

    page.route("**/playground/model", answer)


@pytest.fixture
def page(open_page: Any) -> Page:
    page = open_page(before=with_pictures)
    expect(page.get_by_role("button", name="Picture", exact=True)).to_be_visible()
    return page


def choose(page: Page, *pictures: bytes, name: str = "cat.png", media_type: str = "image/png") -> None:
    page.set_input_files(
        "#picture-file", [{"name": name, "mimeType": media_type, "buffer": each} for each in pictures]
    )


GIVE = """([selector, kind, field, data]) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "cat.png", {type: "image/png"}));
    const event = new (kind === "paste" ? ClipboardEvent : DragEvent)(
        kind, {[field]: transfer, bubbles: true, cancelable: true});
    document.querySelector(selector).dispatchEvent(event);
    return event.defaultPrevented;
}"""


def give(page: Page, selector: str, kind: str, picture: bytes) -> bool:
    """Paste or drop a picture; return whether the page took it."""
    field = "clipboardData" if kind == "paste" else "dataTransfer"
    return page.evaluate(GIVE, [selector, kind, field, base64.b64encode(picture).decode()])


def drafts(page: Page) -> Any:
    return page.locator("#draft-pictures img")


def test_pictures_are_chosen_pasted_and_dropped_and_sent_before_the_text(page: Page) -> None:
    bodies = sent_bodies(page, CHAT)
    choose(page, png(1))
    expect(drafts(page)).to_have_count(1)
    assert give(page, "#input", "paste", png(2)) and give(page, "#chat", "drop", png(3))
    expect(drafts(page)).to_have_count(3)
    expect(page.locator("#context")).to_be_hidden()
    page.locator("#draft-pictures button").nth(1).click()
    expect(drafts(page)).to_have_count(2)
    say(page, "What is this?")
    content = bodies[-1]["messages"][-1]["content"]
    assert content == [part(png(1)), part(png(3)), {"type": "text", "text": "What is this?"}]
    ChatBody.model_validate(bodies[-1])
    expect(page.locator("#draft-pictures")).to_be_hidden()
    shown = page.locator(".user .pictures img")
    assert [shown.nth(index).get_attribute("src") for index in range(2)] == [url_of(png(1)), url_of(png(3))]
    assert shown.first.evaluate("image => image.naturalWidth") == 1  # the policy of the page lets it be shown
    assert page.locator(".user .pictures button:visible").count() == 0


def test_a_picture_alone_can_be_sent_and_is_kept(page: Page) -> None:
    bodies = sent_bodies(page, CHAT)
    wait_for_models(page)
    choose(page, png())
    expect(drafts(page)).to_have_count(1)
    page.press("#input", "Enter")
    wait_for_end(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": [part(png())]}]
    page.reload()
    wait_for_models(page)
    expect(page.locator(".user .pictures img")).to_have_attribute("src", url_of(png()))
    page.get_by_role("button", name="Generate again").click()
    wait_for_end(page)
    assert bodies[-1] == bodies[-2]
    page.locator(".user").hover()
    page.locator(".user [data-action=edit]").click()
    page.fill(".user .edit textarea", "What is this?")
    page.press(".user .edit textarea", "Enter")
    wait_for_end(page)
    assert bodies[-1]["messages"][0]["content"] == [part(png()), {"type": "text", "text": "What is this?"}]


@pytest.mark.parametrize(
    ("size", "media_type", "says"),
    [
        (1001, "image/png", "cat.png has 0.0 MB; the server takes pictures of up to 0.0 MB"),
        (
            10,
            "image/svg+xml",
            "cat.png is not a picture that can be sent: expected PNG, JPEG, WebP, GIF or BMP",
        ),
        (10, "text/html", "cat.png is not a picture that can be sent: expected PNG, JPEG, WebP, GIF or BMP"),
    ],
)
def test_other_files_are_refused_with_a_reason(page: Page, size: int, media_type: str, says: str) -> None:
    choose(page, bytes(size), media_type=media_type)
    expect(page.locator("#toast")).to_have_text(says)
    assert drafts(page).count() == 0


def test_an_imported_picture_must_be_a_data_url(page: Page, tmp_path: Path) -> None:
    """The browser would otherwise ask another host for it."""
    page.click("#open-library")
    entry = '{"text": "x", "pictures": ["https://evil.example.com/a.png"]}'
    (tmp_path / "a.json").write_text(
        '{"inflight_playground": 1, "conversations": [{"id": "1", "mode": "chat", "chat": [' + entry + "], "
        '"completions": []}]}'
    )
    page.set_input_files("#import-file", tmp_path / "a.json")
    expect(page.locator("#toast")).to_contain_text("cannot be imported: expected a picture as a data: URL")


def test_without_pictures_the_page_takes_none(open_page: Any) -> None:
    page = open_page(before=lambda page: with_pictures(page, 0))
    expect(page.locator("#model option")).to_have_count(1)
    assert page.locator("#add-picture").is_hidden()
    assert not give(page, "#input", "paste", png()) and not give(page, "#chat", "drop", png())
    assert drafts(page).count() == 0


def test_completions_have_no_pictures(page: Page) -> None:
    bodies = sent_bodies(page, COMPLETION)
    choose(page, png())
    expect(drafts(page)).to_have_count(1)
    page.get_by_text("Completion", exact=True).click()
    expect(page.locator("#add-picture")).to_be_hidden()
    expect(page.locator("#draft-pictures")).to_be_hidden()
    assert not give(page, "#input", "paste", png())
    say(page, "def f(")
    assert bodies[-1]["prompt"] == "def f("
