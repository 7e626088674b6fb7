"""The page in front of the real application and the demo checkpoint: answers, shades, figures, the engine."""

from __future__ import annotations

import contextlib
import io
import math
import re
import subprocess
import time

import httpx
import openai
import pytest
from playwright.sync_api import expect

from tests.openai_endpoint.playground.steps import (
    CHAT,
    complete,
    errors,
    say,
    sent_bodies,
    setting,
    texts,
    wait_for_end,
    wait_for_models,
)

PROMPT = "def read_lines(path):\n    return"


def test_a_completion_equals_the_openai_clients_and_is_shaded_by_probability(open_page, api) -> None:
    page = open_page()
    page.check("#setting-logprobs")
    complete(page, PROMPT, temperature="0", max_tokens="24", top_logprobs="3")
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    choice = api.completions.create(**asked, logprobs=3).choices[0]
    assert texts(page) == [choice.text]
    pieces = page.locator(".token")
    assert pieces.all_text_contents() == choice.logprobs.tokens
    shades = pieces.evaluate_all("all => all.map(one => Number(one.style.getPropertyValue('--surprise')))")
    surprises = [min(1, value / math.log(0.01)) for value in choice.logprobs.token_logprobs]
    assert shades == pytest.approx(surprises, abs=2e-3) and max(shades) > 0.1
    pieces.nth(4).hover()
    likely = sorted(choice.logprobs.top_logprobs[4].values(), reverse=True)
    bars = page.locator("#tooltip meter").evaluate_all("all => all.map(one => one.value)")
    assert bars == pytest.approx([math.exp(value) for value in likely], rel=1e-3)
    assert re.fullmatch(
        rf"{len(shades)} tokens · .*first after [\d.]+ s · .*prompt of \d+ · complete",
        page.inner_text(".figures"),
    )


def test_prompt_tokens_are_shaded_on_request(open_page, api) -> None:
    page = open_page()
    page.get_by_text("Completion", exact=True).click()
    page.check("#setting-logprobs")
    page.check("#setting-echo")
    complete(page, PROMPT, temperature="0", max_tokens="4")
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True}
    choice = api.completions.create(**asked, logprobs=5).choices[0]
    assert texts(page) == [choice.text] and choice.text.startswith(PROMPT)
    assert page.locator(".token").all_text_contents() == choice.logprobs.tokens


def test_several_answers_are_shown_and_the_chosen_one_is_continued(open_page, api) -> None:
    page = open_page()
    complete(page, PROMPT, n="3", seed="11", max_tokens="12")
    asked = {"model": "demo", "prompt": PROMPT, "n": 3, "seed": 11, "max_tokens": 12}
    answer = api.completions.create(**asked)
    expected = [choice.text for choice in answer.choices]
    assert texts(page) == expected and len({*expected}) == 3
    boxes = [page.locator(".answer").nth(i).bounding_box() for i in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"] == boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    figures = page.locator(".figures").all_text_contents()
    assert all("first after" in each for each in figures)
    assert sum(int(each.split()[0]) for each in figures) == answer.usage.completion_tokens
    page.get_by_role("button", name="Go on with this").nth(1).click()
    page.get_by_role("button", name="Go on from here").click()
    assert page.input_value("#input") == PROMPT + expected[1]


def test_activity_is_shown_and_escape_stops_the_request(open_page, playground_url) -> None:
    page = open_page()
    page.get_by_text("Completion", exact=True).click()
    setting(page, max_tokens="900", n="2", temperature="0")
    page.fill("#input", "class Node:\n    def __init__(self, value):\n        self.value = value\n")
    page.press("#input", "Enter")
    expect(page.locator("[data-figure=running]")).to_have_text("2")
    expect(page.locator("[data-figure=rate]")).to_have_text(re.compile(r"[6-9]|\d\d+"))
    assert page.locator("#engine meter").evaluate("meter => meter.value") > 0
    page.keyboard.press("Escape")
    wait_for_end(page)
    for figures in page.locator(".figures").all_text_contents():
        pace = r"[\d.]+ tokens/s · first after [\d.]+ s · then [\d.]+ ms a token, [\d.]+ at most"
        assert re.fullmatch(rf"\d+ tokens · {pace} · stopped", figures), figures
    deadline = time.monotonic() + 60
    while (state := httpx.get(f"{playground_url}/playground/state").json())["running"]:
        assert time.monotonic() < deadline, state
    assert state["kv_blocks_used"] == 0 and state["waiting"] == 0


def test_a_chat_has_a_history_that_can_be_edited_and_generated_again(open_page, api) -> None:
    page = open_page()
    wait_for_models(page)
    bodies = []
    is_chat = re.compile("/v1/chat/completions$").search
    page.on("request", lambda request: is_chat(request.url) and bodies.append(request.post_data_json))
    page.get_by_text("System prompt").click()
    page.fill("#system", "import os\n")
    setting(page, temperature="0", max_tokens="8")
    say(page, "def first():\n")
    (first,) = texts(page)
    system, user = {"role": "system", "content": "import os\n"}, {"role": "user", "content": "def first():\n"}
    assert bodies[-1]["messages"] == [system, user]
    asked = {"model": "demo", "temperature": 0, "max_tokens": 8}
    assert api.chat.completions.create(messages=[system, user], **asked).choices[0].message.content == first

    say(page, "def second():\n")
    history = [system, user, {"role": "assistant", "content": first}]
    assert bodies[-1]["messages"] == [*history, {"role": "user", "content": "def second():\n"}]
    page.get_by_role("button", name="Generate again").last.click()
    wait_for_end(page)
    assert bodies[-1] == bodies[-2] and page.locator(".turn").count() == 2

    page.reload()
    assert page.locator(".user .text").all_text_contents() == ["def first():\n", "def second():\n"]
    page.get_by_role("button", name="Edit").first.click()
    page.fill(".edit textarea", "def third():\n")
    page.press(".edit textarea", "Enter")
    wait_for_end(page)
    assert bodies[-1]["messages"] == [system, {"role": "user", "content": "def third():\n"}]
    assert page.locator(".user").count() == page.locator(".turn").count() == 1


def test_a_message_without_an_answer_is_not_sent_again(open_page) -> None:
    """Templates that demand turns would refuse two messages of the user in a row."""
    page = open_page()
    bodies = sent_bodies(page, CHAT)
    say(page, "one")
    say(page, "two")
    assert [body["messages"] for body in bodies] == [
        [{"role": "user", "content": text}] for text in ("one", "two")
    ]


@pytest.mark.parametrize(
    "script",
    [
        "for (const name of ['sessionStorage', 'localStorage'])"
        " Object.defineProperty(window, name, {get() { throw new DOMException('no') }})",
        "localStorage.setItem('inflight-playground/settings', '7');"
        "localStorage.setItem('inflight-playground/presets', 'null')",
        "localStorage.setItem('inflight-playground/settings', 'no JSON');"
        "localStorage.setItem('inflight-playground/presets', '[')",
        "sessionStorage.setItem('inflight-playground/open', 'x');"
        'localStorage.setItem(\'inflight-playground/conversation/x\', \'{"id": "x", "chat": 7}\')',
    ],
)
def test_the_page_works_without_valid_stored_state(open_page, script) -> None:
    page = open_page(before=lambda page: page.add_init_script(script))
    bodies = sent_bodies(page, CHAT)
    page.get_by_text("Chat", exact=True).click()
    say(page, "hello")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_server_errors_are_shown_unchanged(open_page, api) -> None:
    page = open_page()
    expect(page.locator("#model option")).to_have_count(1)
    complete(page, PROMPT, temperature="-1")
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="demo", prompt=PROMPT, temperature=-1)
    assert errors(page) == [refused.value.body["message"]]
    assert page.inner_text(".error .heading") == "400 · invalid_request_error · temperature"
    setting(page, temperature="warm")
    page.get_by_role("button", name="Generate again").click()
    wait_for_end(page)
    assert errors(page) == ["Temperature is “warm”, expected a number"]
    page.reload()
    assert texts(page) == [""]


def test_answers_have_the_form_of_a_guide(open_page) -> None:
    page = open_page()
    guides = [
        ("regex", "(19|20)00", {"1900", "2000"}),
        ("choice", "yes\nno, \\\\never", {"yes", "no, \\never"}),
        ("grammar", 'root ::= "one" | "two"', {"one", "two"}),
    ]
    for form, guide, expected in guides:
        page.select_option("#setting-response_format", form)
        setting(page, **{form: guide})
        say(page, PROMPT)
        assert errors(page) == [] and set(texts(page)) <= expected, form
        page.click("#show-code")
        assert f'"structured_outputs": {{"{form}": ' in page.inner_text("#python")
        page.get_by_role("button", name="Close").click()
    page.select_option("#setting-response_format", "json_schema")
    setting(page, schema='{"enum": [7]}')
    say(page, PROMPT)
    assert texts(page)[0].strip() == "7"
    page.fill("#setting-schema", "")
    say(page, PROMPT)
    assert errors(page) == ["JSON schema is empty: write one, or choose another form"]


def test_the_tokens_of_the_next_prompt_are_counted(open_page, api) -> None:
    page = open_page()
    meter = page.locator("#context")
    expect(meter).to_have_text("0 of 1,024 tokens")
    setting(page, temperature="0", max_tokens="5")
    page.fill("#input", "def f(x):")
    messages = [{"role": "user", "content": "def f(x):"}]
    answer = api.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=5)
    expect(meter.locator("b")).to_have_text(str(answer.usage.prompt_tokens))
    say(page, "def f(x):")
    assert f"prompt of {answer.usage.prompt_tokens} ·" in page.inner_text(".figures")
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": "return"})
    page.fill("#input", "return")
    usage = api.chat.completions.create(model="demo", messages=messages, max_tokens=1).usage
    expect(meter.locator("b")).to_have_text(str(usage.prompt_tokens))
    assert meter.locator("meter").evaluate("one => one.value") == pytest.approx(usage.prompt_tokens / 1024)


def test_curl_and_python_get_the_same_answer(open_page) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    prompt = "name = 'it''s \\n' # 🙂\nprint("
    complete(page, prompt, temperature="0", max_tokens="12", top_k="40", stop="\\n\\n", min_p="0.01")
    (text,) = texts(page)
    page.click("#show-code")

    def copied(name: str) -> str:
        page.get_by_role("button", name=f"Copy as {name}").click()
        expect(page.locator("#toast")).to_have_text("Copied")
        return page.evaluate("navigator.clipboard.readText()")

    answer = subprocess.run(["bash", "-c", copied("curl")], capture_output=True, check=True, timeout=30)
    assert httpx.Response(200, content=answer.stdout).json()["choices"][0]["text"] == text
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(copied("Python"), {})
    assert printed.getvalue() == text + "\n"
