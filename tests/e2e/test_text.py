"""Text over the real server on the demo model: curl, generate_stream, and the deltas that add up to the whole."""

from __future__ import annotations

import ast
import json
import subprocess

import pytest

from inflight.text.tokenizer import Tokenizer

from .clients import ask, infer
from .conftest import DEMO_MODEL

PROMPTS = [
    "def fibonacci(n):\n",
    "# 漢字かな交じり文 🙂👩‍👩‍👧 é\n",
    "   leading spaces\n\tand tab",
    "class A:\n    pass\n\n",
]


def curl(server, path: str, body: dict) -> str:
    command = ["curl", "-sN", f"{server.http}/v2/models/{path}", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def events(streamed: str) -> list[dict]:
    return [
        json.loads(line.removeprefix("data:")) for line in streamed.split("\n") if line.startswith("data:")
    ]


def test_curl_generate_answers_with_prompt_and_completion(demo_server):
    answer = json.loads(
        curl(demo_server, "ensemble/generate", {"text_input": "import os\nimport ", "max_tokens": 8})
    )
    assert answer["text_output"].startswith("import os\nimport ")
    assert len(answer["text_output"]) > len("import os\nimport ")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_text_adds_up_to_the_whole(demo_server, prompt):
    body = {"text_input": prompt, "max_tokens": 48}
    whole = json.loads(curl(demo_server, "ensemble/generate", {**body, "exclude_input_in_output": True}))
    deltas = events(curl(demo_server, "ensemble/generate_stream", {**body, "stream": True}))
    assert "".join(event["text_output"] for event in deltas) == whole["text_output"]
    echoed = json.loads(curl(demo_server, "ensemble/generate", {**body, "exclude_input_in_output": False}))
    assert echoed["text_output"] == prompt + whole["text_output"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_and_ids_are_the_same_request(demo_server, prompt):
    """The ids of the prompt, sent as ids, give the ids whose text is the text."""
    tokenizer = Tokenizer.from_dir(str(DEMO_MODEL))
    ids = tokenizer.encode(prompt)
    by_ids = infer(demo_server.http, input_ids=ids, request_output_len=24, end_id=0)
    by_text = infer(demo_server.http, text_input=prompt, request_output_len=24, end_id=0)
    assert by_text.as_numpy("output_ids").tolist() == by_ids.as_numpy("output_ids").tolist()
    assert by_text.as_numpy("output_ids").reshape(-1).tolist()[: len(ids)] == ids


@pytest.mark.parametrize("prompt", ["def read_lines(path):\n", "def parse_args(argv):\n    parser = "])
def test_a_completion_is_python_and_ends_by_itself(demo_server, prompt):
    text = json.loads(curl(demo_server, "ensemble/generate", {"text_input": prompt, "max_tokens": 80}))
    (definition,) = ast.parse(text["text_output"]).body
    assert isinstance(definition, ast.FunctionDef) and definition.body
    assert text["finish_reason"] == "END_ID"


def test_text_ends_at_the_checkpoints_end_id(demo_server):
    answers = ask(
        demo_server.grpc, "ensemble", text_input="def f():\n    return 1\n", max_tokens=300, stream=True
    )
    assert answers[-1].final
    assert "<|endoftext|>" not in "".join(answer.text for answer in answers)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 4}, ["text_input"]),
        ({"text_input": "a"}, ["max_tokens"]),
        ({"text_input": "a", "max_tokens": 100000}, ["max_tokens"]),
        ({"text_input": "a", "max_tokens": 4, "beam_width": 3}, ["beam_width", "3"]),
        ({"text_input": "a", "max_tokens": 4, "temperature": -2}, ["temperature", "-2"]),
    ],
)
def test_curl_gets_a_message_that_names_what_it_sent(demo_server, body, words):
    error = json.loads(curl(demo_server, "ensemble/generate", body))["error"]
    for word in words:
        assert word in error


def test_preprocessing_and_postprocessing_stand_alone(demo_server):
    tokenizer = Tokenizer.from_dir(str(DEMO_MODEL))
    ids = json.loads(
        curl(demo_server, "preprocessing/generate", {"QUERY": "def f(x):", "REQUEST_OUTPUT_LEN": 5})
    )["INPUT_ID"]
    assert ids == tokenizer.encode("def f(x):")
