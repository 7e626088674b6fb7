"""The page as a document: its content policy, model output, fields, keys, widths and themes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from inflight.openai.playground import routes
from inflight.openai.protocol import ChatBody, CompletionBody
from tests.openai_endpoint.playground import browser as browser_module
from tests.openai_endpoint.playground.steps import (
    CHAT,
    COMPLETION,
    answer_with,
    complete,
    errors,
    say,
    sent_bodies,
    setting,
    texts,
    without_stream,
)
from tests.openai_endpoint.serving import served

EVIL = "<script>window.ran = true</script><img src=x onerror='window.ran = true'><b>bold</b>"


def test_the_page_is_one_document_and_its_policy_blocks_all_else(open_page, playground_url) -> None:
    asked: list[str] = []
    page = open_page(before=lambda page: page.on("request", lambda request: asked.append(request.url)))
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("[data-figure=running]")).to_have_text("0")
    assert {url.removeprefix(playground_url) for url in asked if not url.startswith("data:")} <= {
        "/",
        "/v1/models",
        "/playground/state",
        "/playground/model",
    }
    answer = httpx.get(playground_url)
    assert {*re.findall(r"https?://[a-z][^\s'\"<>%`,]+", answer.text)} == {
        "http://www.w3.org/2000/svg",
        "https://github.com/markedjs/marked",  # in a comment and in an error message
        "https://github.com/markedjs/marked.",
    }
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    parts = [path for path in Path(routes.__file__).with_name("page").rglob("*") if path.is_file()]
    for path in parts:
        is_inside = path.read_text(encoding="utf-8").strip() in answer.text
        assert is_inside or path.name in ("index.html", "marked-LICENSE"), f"{path} is not in the page"


def test_model_output_is_never_executed(open_page) -> None:
    page = open_page(before=lambda page: page.route("**/v1/models", evil_models))
    page.check("#setting-logprobs")
    token = {"token": EVIL, "logprob": -1.0, "top_logprobs": [{"token": EVIL + "2", "logprob": -0.5}]}
    answer_with(
        page,
        CHAT,
        {
            "choices": [
                {"index": 0, "delta": {"reasoning_content": EVIL}, "logprobs": None, "finish_reason": None}
            ]
        },
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": EVIL},
                    "logprobs": {"content": [token]},
                    "finish_reason": EVIL,
                }
            ]
        },
        {"error": {"message": EVIL, "type": EVIL}},
    )
    say(page, EVIL)
    assert texts(page) == [EVIL] and errors(page) == [EVIL]
    assert (
        page.locator(".user .text").text_content() == page.locator(".reasoning-text").text_content() == EVIL
    )
    page.locator(".token").hover()
    expect(page.locator("#tooltip li .token-text").first).to_contain_text("<script>")
    page.click("#show-code")
    assert "<script>" in page.locator("#python").inner_text()
    assert page.locator("img, b:not([data-figure], #context b), script").count() == 1  # the page's own script
    assert page.evaluate("window.ran") is None
    # Even after a mistake in the script, text is not parsed as HTML.
    attempt = (
        "text => { try { document.body.innerHTML = text; return ''; } catch (error) { return error.name; } }"
    )
    assert page.evaluate(attempt, EVIL) == "TypeError"


def evil_models(route: Route) -> None:
    route.fulfill(json={"object": "list", "data": [{"id": EVIL, "parent": EVIL}]})


def test_every_setting_becomes_its_field_and_empty_ones_are_not_sent(open_page) -> None:
    page = open_page()
    expect(page.locator("#model option")).to_have_count(1)
    chats, completions = sent_bodies(page, CHAT), sent_bodies(page, COMPLETION)
    say(page, "Hello")
    messages = [{"role": "user", "content": "Hello"}]
    plain = {"max_completion_tokens": 256}
    assert without_stream(chats[-1]) == {"model": "demo", "messages": messages, **plain}
    numbers = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "n": 2, "frequency_penalty": 0.25,
        "presence_penalty": -0.5, "repetition_penalty": 1.1,
    }  # fmt: skip
    setting(page, **{field: str(value) for field, value in numbers.items()}, max_tokens="9", stop="\\n\nEND")
    page.check("#setting-logprobs")
    page.select_option("#setting-response_format", "json_schema")
    setting(page, schema='{"type": "object"}', top_logprobs="2")
    say(page, "More")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    common = {**numbers, "stop": ["\n", "END"], "response_format": form}
    body = without_stream(chats[-1])
    assert body.pop("messages")[-1] == {"role": "user", "content": "More"}
    assert body == {
        "model": "demo",
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        **common,
    }
    ChatBody.model_validate(chats[-1])
    complete(page, "Begin")
    assert without_stream(completions[-1]) == {
        "model": "demo", "prompt": "Begin", "max_tokens": 9, "logprobs": 2, **common
    }  # fmt: skip
    CompletionBody.model_validate(completions[-1])
    setting(page, schema="{")
    say(page, "Begin")
    assert len(completions) == 1 and "JSON schema cannot be read" in errors(page)[0]


def test_an_api_key_is_requested_after_a_401(open_page, engine_client) -> None:
    """After that the page asks again whether the model has a chat template, and begins with completions if not."""
    with served(engine_client, api_keys=("secret",)) as url:
        page = open_page(url, before=without_template)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#model option")).to_have_text(["demo"])
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.get_by_role("radio", name="Completion")).to_be_checked()
        setting(page, max_tokens="2")
        say(page, "def f(")
        assert errors(page) == [] and len(texts(page)) == 1
        assert "Bearer $OPENAI_API_KEY" in shown_code(page, "curl")
        assert "secret" not in shown_code(page, "curl") + shown_code(page, "python")


REASON = "this model has no chat template: <b>start</b> the server with one"


def without_template(page: Page) -> None:
    """Have the page told that the model has no chat template, once its key is accepted."""

    def answer(route: Route) -> None:
        answered = route.fetch()
        told = {"has_chat_template": False, "reason": REASON}
        route.fulfill(response=answered, json=told if answered.ok else answered.json())

    page.route("**/playground/model", answer)


def test_chat_is_disabled_with_the_reason_without_a_template(open_page) -> None:
    page = open_page()
    bodies = sent_bodies(page, CHAT)
    say(page, "Hello")
    without_template(page)
    page.reload()
    notice = page.locator("#no-chat")
    expect(notice).to_have_text(f"Chat is not available: {REASON}")
    assert page.get_by_text("Hello").is_visible()  # a conversation of another model can still be read
    page.fill("#input", "More")
    page.press("#input", "Enter")
    assert page.get_by_role("button", name="Send").is_disabled() and len(bodies) == 1
    page.click("#new")
    expect(page.get_by_role("radio", name="Chat")).to_be_disabled()
    page.get_by_text("Completion", exact=True).click()
    setting(page, max_tokens="2")
    say(page, "def f(")
    assert errors(page) == [] and notice.is_visible()


def shown_code(page: Page, name: str) -> str:
    if not page.locator("#code").is_visible():
        page.click("#show-code")
    return page.inner_text(f"#{name}")


def test_tokens_of_one_character_are_shaded_together(open_page) -> None:
    page = open_page()
    page.check("#setting-logprobs")
    tokens = [
        ("I", -0.1),
        ("bytes:\\xf0\\x9f", -2.0),
        ("bytes:\\x99\\x82", -0.5),
        (" you", -0.2),
        ("", -0.01),
    ]
    parts = ["I", "", "🙂", " yo", "u"]
    events = []
    for (token, value), text in zip(tokens, parts, strict=True):
        told = {"content": [{"token": token, "logprob": value, "top_logprobs": []}]}
        events.append({"choices": [{"index": 0, "delta": {"content": text}, "logprobs": told}]})
    answer_with(page, CHAT, *events)
    say(page, "Hello")
    assert texts(page) == ["I🙂 you"]
    assert page.locator(".token").all_text_contents() == ["I", "🙂", " you"]


def test_a_broken_stream_keeps_its_text_and_shows_an_error(open_page) -> None:
    page = open_page()
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=event))
    say(page, "Hello")
    assert texts(page) == ["half"] and errors(page) == ["The connection ended before the answer did."]


def test_the_engine_is_asked_only_while_the_page_is_visible(open_page) -> None:
    asked: list[str] = []
    page = open_page(before=watch_states(asked))
    page.wait_for_timeout(100)
    page.clock.run_for(3_000)
    assert len(asked) >= 2
    show = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); "
    show += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    page.wait_for_timeout(100)
    before = len(asked)
    page.clock.run_for(10_000)
    assert len(asked) == before
    page.evaluate(show, False)
    page.wait_for_timeout(100)
    assert len(asked) > before


def watch_states(asked: list[str]):
    def before(page: Page) -> None:
        page.clock.install()
        page.on("request", lambda request: "playground/state" in request.url and asked.append(request.url))

    return before


def test_keys_navigate_and_every_input_has_an_accessible_name(open_page) -> None:
    """Shift+Enter breaks the line, arrows move between tokens, and every input has an accessible name."""
    page = open_page()
    page.press("#input", "a")
    page.press("#input", "Shift+Enter")
    page.press("#input", "b")
    assert page.input_value("#input") == "a\nb"
    page.check("#setting-logprobs")
    complete(page, "def f(", max_tokens="4", temperature="0")
    page.locator(".flow .text").focus()
    for expected in (0, 1, 0):
        page.keyboard.press("ArrowLeft" if expected == 0 else "ArrowRight")
        assert page.locator(".token").nth(expected).get_attribute("class") == "token current"
    assert page.locator("#tooltip").is_visible()
    names = page.locator("body").aria_snapshot()
    fields = re.findall(r"- (?:textbox|combobox|button|switch|radio|checkbox)(.*)", names)
    assert len(fields) > 25 and [field for field in fields if not field.startswith((' "', " '"))] == []


def test_without_chromium_the_error_names_the_package(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browser_module, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        browser_module.find_chromium()
