"""Text on the real server with the demo model: curl, generate_stream, and deltas that add up."""

from __future__ import annotations

import ast
import json
import subprocess

import numpy as np
import pytest
import tritonclient.grpc as grpc

from inflight.text.tokenizer import Tokenizer

from .clients import ask, infer, unary
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
def test_text_and_its_ids_give_the_same_output(demo_server, prompt):
    """A prompt sent as text and as ids gives the same output ids, whose text is the text output."""
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


# The demo model's output is a docstring and a return; it contains all stop strings but one, most across
# tokens.
STOPPED_PROMPT = "def read_lines(path):\n"
STOP_STRINGS = [
    ["\n"],
    ["return", "turn"],
    ["put str", "input stream"],
    ['"\n  '],
    ["no such text"],
    [")", "(path)"],
]


def cut_at(text: str, stops: list[str]) -> str:
    """Return the text up to the stop string that ends first, or the longest of those."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return text
    return text[: min(min(ends) - len(stop) for stop in stops if text[: min(ends)].endswith(stop))]


@pytest.mark.parametrize("stops", STOP_STRINGS)
def test_text_ends_before_a_stop_string_streamed_or_not(demo_server, stops):
    body = {"text_input": STOPPED_PROMPT, "max_tokens": 60, "exclude_input_in_output": True}
    whole = json.loads(curl(demo_server, "ensemble/generate", body))["text_output"]
    stopped = json.loads(curl(demo_server, "ensemble/generate", {**body, "stop_words": stops}))
    deltas = events(
        curl(demo_server, "ensemble/generate_stream", {**body, "stop_words": stops, "stream": True})
    )
    assert stopped["text_output"] == cut_at(whole, stops)
    assert "".join(event["text_output"] for event in deltas) == stopped["text_output"]
    was_cut = stopped["text_output"] != whole
    assert (stopped["finish_reason"] == "STOP_WORDS") == was_cut == (stops != ["no such text"])
    assert deltas[-1]["finish_reason"] == stopped["finish_reason"]


def test_the_ids_end_with_the_token_that_completes_the_stop_string(demo_server):
    tokenizer = Tokenizer.from_dir(str(DEMO_MODEL))
    given = {"text_input": STOPPED_PROMPT, "request_output_len": 60, "exclude_input_in_output": True}
    stop = np.array([[b"put str"]], dtype=np.object_)
    streamed = ask(demo_server.grpc, stop_words=stop, streaming=True, **given)
    ids = [token for answer in streamed for token in answer.ids]
    assert "put str" in tokenizer.decode(ids) and "put str" not in tokenizer.decode(ids[:-1])
    whole = infer(demo_server.http, stop_words=stop, **given)
    assert whole.as_numpy("output_ids").reshape(-1).tolist() == ids
    assert whole.as_numpy("sequence_length").tolist() == [[len(ids)]]


def test_sequences_stop_independently(demo_server):
    sampled = {"runtime_top_k": 50, "num_return_sequences": 3, "request_output_len": 60}
    tensors = {name: np.array([[value]], np.int32) for name, value in sampled.items()}
    given = {"text_input": STOPPED_PROMPT, "exclude_input_in_output": True, **tensors}
    whole = ask(demo_server.grpc, **given)
    stops = np.array([[b"return", b"\n\n"]], dtype=np.object_)
    cut = ask(demo_server.grpc, stop_words=stops, **given)

    def by_sequence(answers):
        return {a.outputs["sequence_index"].item(): a.text for a in answers if "text_output" in a.outputs}

    wanted = {index: cut_at(text, ["return", "\n\n"]) for index, text in by_sequence(whole).items()}
    assert by_sequence(cut) == wanted
    assert len(set(wanted.values())) > 1


def test_a_bad_word_is_never_generated(demo_server):
    body = {"text_input": STOPPED_PROMPT, "max_tokens": 60, "exclude_input_in_output": True}
    whole = json.loads(curl(demo_server, "ensemble/generate", body))["text_output"]
    word = next(word for word in ("return", "input") if word in whole)
    without = json.loads(curl(demo_server, "ensemble/generate", {**body, "bad_words": [word]}))
    assert word not in without["text_output"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 4}, ["text_input"]),
        ({"text_input": "a"}, ["max_tokens"]),
        ({"text_input": "a", "max_tokens": 100000}, ["max_tokens"]),
        ({"text_input": "a", "max_tokens": 4, "beam_width": 3000}, ["beam_width", "3000"]),
        ({"text_input": "a", "max_tokens": 4, "temperature": -2}, ["temperature", "-2"]),
    ],
)
def test_curl_gets_an_error_that_names_the_sent_field(demo_server, body, words):
    error = json.loads(curl(demo_server, "ensemble/generate", body))["error"]
    for word in words:
        assert word in error


def test_preprocessing_and_postprocessing_can_be_called_separately(demo_server):
    tokenizer = Tokenizer.from_dir(str(DEMO_MODEL))
    ids = json.loads(
        curl(demo_server, "preprocessing/generate", {"QUERY": "def f(x):", "REQUEST_OUTPUT_LEN": 5})
    )["INPUT_ID"]
    assert ids == tokenizer.encode("def f(x):")


def test_texts_have_no_batch_dimension(demo_server, tokenizer):
    """`as_numpy("text_output")[0].decode()` works as with tensorrtllm_backend; one text per sequence."""
    result = unary(demo_server.grpc, text_input="import os", request_output_len=3)
    assert result.as_numpy("text_output").shape == (1,)
    assert result.as_numpy("text_output")[0].decode().startswith("import os")
    for answer in ask(demo_server.grpc, "ensemble", text_input="import os", max_tokens=3, stream=True):
        assert answer.outputs["text_output"].shape == (1,)

    ids = np.array([[tokenizer.encode("def f(x):")[:2], tokenizer.encode("x = 12")[:2]]], np.int32)
    lengths = np.array([[2, 1]], np.int32)
    inputs = []
    for name, array in (("TOKENS_BATCH", ids), ("SEQUENCE_LENGTH", lengths)):
        inputs.append(grpc.InferInput(name, list(array.shape), "INT32"))
        inputs[-1].set_data_from_numpy(array)
    with grpc.InferenceServerClient(demo_server.grpc) as client:
        output = client.infer("postprocessing", inputs).as_numpy("OUTPUT")
    expected = [tokenizer.decode(row[:n].tolist()) for row, n in zip(ids[0], lengths[0])]
    assert [text.decode() for text in output] == expected and output.shape == (2,)
