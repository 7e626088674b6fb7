"""Guides on the real server, from every kind of client, and the examples of docs/guided-decoding.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import pytest

from inflight_client import Client, Guide, ServerError
from tests.guided.at_random import make_bomb
from tests.tiers import examples

from .clients import ask, completion

ROOT = Path(__file__).parents[2]
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["id", "tags"],
    "additionalProperties": False,
}  # fmt: skip
PROMPT = list(range(10, 30))
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}
GUIDES = {
    "json_schema": (json.dumps(SCHEMA), None),
    "regex": ("[a-f]{3,8}(-[0-9]{2}){2}", "[a-f]{3,8}(-[0-9]{2}){2}"),
    "ebnf_grammar": ('root ::= "x" [0-9] ("," [0-9])*', "x[0-9](,[0-9])*"),
    "structural_tag": (json.dumps(TAGS), r"(?s)(<f>\s*null\s*</f>|(?!<f).)*"),
}


@pytest.fixture(scope="module")
def client(demo_server) -> Client:
    return Client(demo_server.grpc)


def check(kind: str, text: str) -> None:
    pattern = GUIDES[kind][1]
    if pattern is None:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(pattern, text), text


@pytest.mark.covers("guided_decoding_guide_type", "guided_decoding_guide")
def test_a_guide_can_be_given_by_tensors(demo_server, tokenizer):
    answer = completion(
        demo_server.grpc,
        input_ids=PROMPT,
        request_output_len=20,
        guided_decoding_guide_type="regex",
        guided_decoding_guide="[ab]{5}",
    )
    assert re.fullmatch("[ab]{5}", tokenizer.decode(answer.ids)), "it ends without an end id"


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("prompt", ["class A:\n    ", PROMPT], ids=["text", "ids"])
def test_finished_texts_match_their_guide(client, kind, prompt):
    guide = Guide(kind, GUIDES[kind][0])
    for seed in range(examples(1, all=3)):
        done = client.generate(prompt, 60, guide=guide, top_p=1.0, seed=seed)
        if done.finish_reason == "END_ID" and done.text:
            check(kind, done.text)
        streamed = list(client.stream(prompt, 60, guide=guide, top_p=1.0, seed=seed))
        assert [token for delta in streamed for token in delta.token_ids] == list(done.token_ids)


def test_a_json_guide_needs_no_schema(client):
    done = client.generate("x = ", 40, guide=Guide("json"))
    assert done.text.lstrip()[0] in "[{"


def test_guides_work_with_beams_and_drafts(client):
    guide = Guide("regex", GUIDES["regex"][0])
    beams = client.generate("x", 40, guide=guide, beam_width=3, num_return_sequences=3)
    for sequence in beams.sequences:
        check("regex", sequence.text)
    assert (
        client.generate("x", 40, guide=guide, prompt_lookup_num_tokens=4).text
        == client.generate("x", 40, guide=guide).text
    )


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("xml", "<a/>", "guided_decoding_guide_type is 'xml', expected one of json, json_schema"),
        ("json", "{}", "must be left out"),
        ("regex", "", "is required"),
        ("regex", "(a", "unclosed group"),
        ("json_schema", '{"type": "foo"}', "type is"),
        ("ebnf_grammar", "nothing", "cannot be used"),
        ("structural_tag", "[]", "structures"),
        ("regex", "x" * 70000, "70000 bytes, expected at most 65536"),
    ],
)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_invalid_guides_are_refused(demo_server, model, kind, text, message):
    request = {"input_ids": PROMPT, "request_output_len": 4}
    if model == "ensemble":
        request = {"text_input": "def f", "max_tokens": 4}
    (answer,) = ask(
        demo_server.grpc, model, **request, guided_decoding_guide_type=kind, guided_decoding_guide=text
    )
    assert message in str(answer.error)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("regex", "[ab]{5}", "[ab]{5}"),
        ("json_schema", '{"type": "string", "pattern": "^(a+)+$", "maxLength": 3}', '"a{1,3}"'),
    ],
)
def test_guides_can_be_given_over_http(demo_server, kind, text, expected):
    done = generate(demo_server, guided_decoding_guide_type=kind, guided_decoding_guide=text)
    assert re.fullmatch("x = " + expected, done["text_output"]), done


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("REGEX", "[ab]", "guided_decoding_guide_type is 'REGEX', expected one of"),
        (["regex", "regex"], ["a", "b"], "batch size does not match"),
        ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "guided_decoding_guide"),
        ("regex", "(" * 3000 + "a" + ")" * 3000, "guided_decoding_guide"),
        ("json_schema", '{"$ref": "#"}', "guided_decoding_guide"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "guided_decoding_guide"),
        ("json_schema", '{"x-guidance": {"item_separator": ";"}}', "x-guidance"),
    ],
)
def test_wrong_guides_over_http_are_refused(demo_server, kind, text, message):
    done = generate(demo_server, guided_decoding_guide_type=kind, guided_decoding_guide=text)
    assert "text_output" not in done
    assert message in done["error"]


def generate(server, **parameters) -> dict:
    """Return the response of the generate endpoint, also if it is an error."""
    body = {"text_input": "x = ", "max_tokens": 30, **parameters}
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/ensemble/generate", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_a_guide_without_a_type_is_refused(demo_server):
    (answer,) = ask(demo_server.grpc, input_ids=PROMPT, request_output_len=4, guided_decoding_guide="[ab]")
    assert "guided_decoding_guide came without guided_decoding_guide_type" in str(answer.error)


def test_other_requests_are_answered_until_a_guide_exceeds_its_compile_timeout(demo_server, client):
    bomb = make_bomb()
    slow = client.stream("x", 10, guide=Guide(bomb.type.value, bomb.text), request_id="slow")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            list(slow)
        except ServerError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    plain = completion(demo_server.grpc, input_ids=PROMPT, request_output_len=30, end_id=-1)
    assert len(plain.ids) == 30
    waiting.join(60)
    (error,) = errors
    assert "guided_decoding_compile_timeout_ms" in str(error)
    assert client.generate("x", 10, guide=Guide("regex", "[ab]{2}")).text in ("aa", "ab", "ba", "bb")


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs/guided-decoding.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)


def test_the_guide_pages_example_runs(demo_server):
    (program,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:8001", demo_server.grpc)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, year, number = done.stdout.splitlines()
    assert first.startswith("{'name': ")
    assert re.fullmatch("(19|20)[0-9]{2}", year) and re.fullmatch(r"[0-9]+(\.[0-9]{2})?", number)


def test_the_guide_pages_command_runs(demo_server):
    (command,) = blocks("bash")
    command = command.strip().replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        f"{command} --url {demo_server.grpc}", shell=True, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip() in ("yes", "no")) == (0, True), done.stderr
