"""Conversations and presets that the browser keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from inflight.openai.protocol import ChatBody
from tests.openai_endpoint.playground.steps import (
    CHAT,
    COMPLETION,
    answer_with,
    complete,
    say,
    setting,
    texts,
    wait_for_end,
)

CALL = {"index": 0, "id": "call-1", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
TITLE = "<img src=x onerror='window.ran = true'>"


def answer(page: Page, text: str = "yes", **delta: Any) -> None:
    """Answer all later chats with this text."""
    page.unroute(CHAT)
    answer_with(page, CHAT, {"choices": [{"index": 0, "delta": {"content": text, **delta}}]})


def titles(page: Page) -> list[str]:
    """Return the titles in the list of conversations."""
    return page.locator("#library [data-action=open]").all_text_contents()


def exported(page: Page, button: str = "Export all") -> dict[str, Any]:
    """Return the content of the file that the page lets the browser download."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button, exact=True).first.click()
    assert download.value.suggested_filename.endswith(".json")
    return json.loads(Path(download.value.path()).read_text(encoding="utf-8"))


def imported(page: Page, content: str) -> str:
    """Import a file, and return what the page says about it."""
    page.locator("#toast").evaluate("toast => (toast.textContent = '')")
    file = {"name": "talk.json", "mimeType": "application/json", "buffer": content.encode()}
    page.set_input_files("#import-file", file)
    expect(page.locator("#toast")).not_to_be_empty()
    return page.locator("#toast").inner_text()


def two_conversations(page: Page) -> None:
    """Have a chat with a system prompt and a call, and a completion with two answers."""
    page.get_by_text("System prompt").click()
    page.fill("#system", "Be brief")
    answer(page, "calling", reasoning_content="hm", tool_calls=[CALL])
    say(page, "What time is it?")
    page.fill(".call textarea", "noon")
    page.click("#new")
    events = [{"choices": [{"index": index, "text": text}]} for index, text in enumerate(["one", "two"])]
    answer_with(page, COMPLETION, *events)
    complete(page, "Count:", n="2")
    page.get_by_role("button", name="Go on with this").nth(1).click()
    page.click("#open-library")


def test_conversations_are_kept_listed_and_opened_in_a_new_tab(open_page) -> None:
    page = open_page()
    two_conversations(page)
    expect(page.locator("#library [data-action=open]")).to_have_count(2)
    assert titles(page) == ["Count:", "What time is it?"]
    page.reload()
    assert page.locator(".turn:visible .flow .text").all_text_contents() == ["one", "two"]
    assert page.locator(".answer.chosen").inner_text().startswith("Count:two")

    other = page.context.new_page()
    other.goto(page.url)
    assert other.locator(".turn").count() == 0  # a new tab begins a new conversation
    other.click("#open-library")
    other.get_by_role("button", name="What time is it?").click()
    assert texts(other) == ["calling"] and other.input_value("#system") == "Be brief"
    assert other.input_value(".call textarea") == "noon"
    assert other.locator(".reasoning-text").text_content() == "hm"
    assert other.get_by_role("radio", name="Chat").is_checked()
    assert other.locator("[aria-current]").all_text_contents() == ["What time is it?"]


def test_a_conversation_is_renamed_and_deleted(open_page) -> None:
    page = open_page()
    two_conversations(page)
    page.get_by_role("button", name="Rename").nth(1).click()
    page.get_by_label("New title").fill(TITLE)
    page.keyboard.press("Enter")
    assert titles(page) == ["Count:", TITLE] and page.evaluate("window.ran") is None
    page.reload()
    page.click("#open-library")
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.get_by_role("button", name="Delete", exact=True).first.click()
    assert titles(page) == [TITLE] and asked == ["Delete “Count:”?"]
    assert page.locator(".turn").count() == 0
    page.reload()
    page.click("#open-library")
    assert titles(page) == [TITLE]


def test_exported_conversations_are_imported_by_another_browser(open_page) -> None:
    page = open_page()
    two_conversations(page)
    everything = exported(page)
    assert everything["inflight_playground"] == 1 and len(everything["conversations"]) == 2
    completion, talk = everything["conversations"]
    assert exported(page, "Export")["conversations"] == [completion]
    assert talk["chat"][0] == {"text": "What time is it?"} and talk["system"] == "Be brief"
    assert [each["text"] for each in completion["completions"][0]["answers"]] == ["one", "two"]

    other = open_page()
    other.click("#open-library")
    assert imported(other, json.dumps(everything)) == "Imported: 2"
    other.get_by_role("button", name="Count:").click()
    assert texts(other) == ["one", "two"]
    again = exported(other)["conversations"]

    def without_ids(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        all_of_them = [{**each, "id": "", "changed": 0} for each in conversations]
        return sorted(all_of_them, key=lambda each: each["mode"])

    assert without_ids(again) == without_ids(everything["conversations"])


def test_a_conversation_with_a_request_that_was_not_sent_is_opened_and_imported(open_page) -> None:
    page = open_page()
    answer(page)
    say(page, "Hello")
    say(page, "Once more")
    setting(page, max_tokens="many")
    say(page, "Not now")
    assert page.locator(".error .heading").inner_text() == "Not sent"
    page.click("#new")
    page.click("#open-library")
    page.get_by_role("button", name="Hello").click()
    assert page.locator(".user .text").all_text_contents() == ["Hello", "Once more", "Not now"]
    everything = exported(page)
    assert everything["conversations"][0]["chat"][-1] == {"answers": [], "chosen": 0, "prompt": None}

    other = open_page()
    other.click("#open-library")
    assert imported(other, json.dumps(everything)) == "Imported: 1"
    other.get_by_role("button", name="Hello").click()
    answer(other, "Now")
    other.get_by_role("button", name="Generate again").last.click()
    wait_for_end(other)
    assert texts(other) == ["Now"]


def test_a_file_of_another_form_is_refused(open_page) -> None:
    page = open_page()
    page.click("#open-library")
    talk = {"id": "x", "mode": "chat", "chat": [], "completions": []}
    turn = {"answers": [{"text": "yes"}], "chosen": "length"}
    none = {"answers": [], "chosen": 1}
    wrong = [{"chat": [{"text": 7}]}, {"mode": "__proto__"}, {"completions": [turn]}, {"id": None}]
    wrong.append({"chat": [none]})
    files: list[Any] = [{"inflight_playground": 2, "conversations": []}, {"inflight_playground": 1}]
    files += [{"inflight_playground": 1, "conversations": [{**talk, **change}]} for change in wrong]
    for content in ["no JSON", *map(json.dumps, files)]:
        assert imported(page, content).startswith("talk.json cannot be imported: "), content
    assert titles(page) == []


def test_the_results_of_a_call_are_sent_by_hand(open_page) -> None:
    page = open_page()
    tool = {"name": "get_time", "parameters": {"type": "object"}}
    setting(page, tools=json.dumps(tool))
    page.select_option("#setting-tool_choice", "required")
    parts = [
        {**CALL, "function": {"name": "get_time", "arguments": '{"zo'}},
        {"index": 0, "function": {"arguments": 'ne": "UTC"}'}},
    ]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in parts]
    answer_with(page, CHAT, *events)
    say(page, "What time is it?")
    assert json.loads(page.inner_text(".call .arguments")) == {"zone": "UTC"}
    page.get_by_label("Result of get_time").fill("noon")
    page.unroute(CHAT)
    answer(page, "It is noon.")
    with page.expect_request(CHAT) as sent:
        page.get_by_role("button", name="Send results").click()
    wait_for_end(page)
    body = sent.value.post_data_json
    ChatBody.model_validate(body)
    function = CALL["function"]
    assert body["messages"] == [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [{"id": "call-1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
    ]
    assert body["tools"] == [{"type": "function", "function": tool}] and body["tool_choice"] == "required"
    assert texts(page) == ["It is noon."]
    page.get_by_role("button", name="Send results").click()  # the later answer is replaced
    wait_for_end(page)
    assert page.locator(".turn").count() == 2
    page.reload()
    with page.expect_request(CHAT) as sent:
        say(page, "Thanks")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == [
        "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip


def test_presets_keep_settings_and_the_system_prompt(open_page) -> None:
    page = open_page()
    page.get_by_text("System prompt").click()
    page.fill("#system", "Translate")
    setting(page, temperature="0.3", stop="END")
    page.select_option("#setting-theme", "dark")
    page.fill("#preset-name", "Translator")
    page.get_by_role("button", name="Save as").click()
    page.select_option("#preset", "Defaults")
    assert page.input_value("#setting-temperature") == "" and page.input_value("#setting-max_tokens") == "256"
    assert page.input_value("#setting-theme") == "dark"  # what changes only the page is no part of a preset
    page.click("#new")
    page.reload()
    page.select_option("#preset", "Translator")
    values = [page.input_value(f"#{name}") for name in ("setting-temperature", "setting-stop", "system")]
    assert values == ["0.3", "END", "Translate"]
    page.get_by_role("button", name="Delete", exact=True).click()
    assert "Translator" not in page.locator("#preset option").all_text_contents()


def test_a_full_storage_is_told(open_page) -> None:
    page = open_page()
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 200))")
    answer(page, "long " * 100)
    say(page, "Hello")
    expect(page.locator("#toast")).to_have_text("The browser has no room: this conversation is not kept")
    assert texts(page) == ["long " * 100]
