"""Special tokens that tokenizer.json lacks, on a real server: shown on request, and able to stop a text."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http

from inflight.server.launch import TritonServer, serve
from inflight.text.tokenizer import Tokenizer

from .clients import ask, infer
from .conftest import DEMO_MODEL
from .test_text import curl, events

END = "<|endoftext|>"
PROMPT = "def read_lines(path):\n"
DEFAULT_INPUTS = {"exclude_input_in_output": True, "end_id": -1}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model's tokenizer with its special token in tokenizer_config.json only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    pipeline = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    (added,) = pipeline["added_tokens"]
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(added.pop("id")): added}
    (folder / "tokenizer.json").write_text(json.dumps({**pipeline, "added_tokens": []}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def showing_server(elsewhere: Path, tokenizer_folder: Path) -> Iterator[TritonServer]:
    """`exact_server` with that tokenizer; special tokens are shown.

    It is in float32, because two servers are compared: in bfloat16 the two best logits may differ by only
    0.02.
    """
    settings = {"tokenizer_dir": str(tokenizer_folder), "skip_special_tokens": "false"}
    with serve(dtype="float32", settings=settings) as server:
        yield server


@pytest.fixture(params=["skipped", "shown"])
def server(request: pytest.FixtureRequest) -> TritonServer:
    return request.getfixturevalue("exact_server" if request.param == "skipped" else "showing_server")


def generate(server: TritonServer, **changes: object) -> dict:
    body = {"text_input": PROMPT, "max_tokens": 80, **DEFAULT_INPUTS, **changes}
    return json.loads(
        curl(server, "ensemble/generate", {key: body[key] for key in body if body[key] is not None})
    )


def stream(server: TritonServer, **changes: object) -> list[dict]:
    body = {"text_input": PROMPT, "max_tokens": 80, **DEFAULT_INPUTS, "stream": True, **changes}
    return events(curl(server, "ensemble/generate_stream", body))


def test_a_special_token_stops_through_every_model_streamed_or_not(server):
    """The model ends its function with the token, and continues after it if nothing stops it."""
    ended = generate(server, end_id=None)
    assert ended["finish_reason"] == "END_ID"
    assert generate(server)["finish_reason"] == "LENGTH"
    stopped = generate(server, stop_words=[END])
    assert (stopped["text_output"], stopped["finish_reason"]) == (ended["text_output"], "STOP_WORDS")
    deltas = stream(server, stop_words=[END])
    assert "".join(delta["text_output"] for delta in deltas) == ended["text_output"]
    assert deltas[-1]["finish_reason"] == "STOP_WORDS"

    by_text = {"text_input": PROMPT, "request_output_len": 80, "stop_words": [END], **DEFAULT_INPUTS}
    whole = infer(server.http, **by_text)
    assert whole.as_numpy("text_output").item().decode() == ended["text_output"]
    assert whole.as_numpy("output_ids").reshape(-1)[-1] == 0
    streamed = ask(server.grpc, streaming=True, **by_text)
    assert "".join(answer.text for answer in streamed) == ended["text_output"]
    assert streamed[-1].finish_reason == "STOP_WORDS"


def test_a_special_token_after_other_text_stops_too(server):
    ended = generate(server, end_id=None)["text_output"]
    stop = ended[-5:] + END
    assert generate(server, stop_words=[stop])["text_output"] == ended[:-5]
    assert "".join(delta["text_output"] for delta in stream(server, stop_words=[stop])) == ended[:-5]
    assert generate(server, stop_words=["no" + END])["finish_reason"] == "LENGTH"


def test_beams_stop_at_a_special_token(server):
    searched = generate(server, stop_words=[END], beam_width=2)
    (text, *_), (reason, *_) = searched["text_output"], searched["finish_reason"]
    assert (END not in text, reason) == (True, "STOP_WORDS")


def test_a_special_token_as_a_bad_word_is_never_generated(server):
    given = {"text_input": PROMPT, "request_output_len": 80, **DEFAULT_INPUTS}
    assert 0 in infer(server.http, **given).as_numpy("output_ids")
    assert 0 not in infer(server.http, bad_words=[END], **given).as_numpy("output_ids")


def test_every_model_shows_special_tokens_if_configured(showing_server, exact_server):
    shown, skipped = generate(showing_server)["text_output"], generate(exact_server)["text_output"]
    assert END in shown and shown.replace(END, "") == skipped
    assert "".join(delta["text_output"] for delta in stream(showing_server)) == shown
    given = {"text_input": PROMPT, "request_output_len": 80, **DEFAULT_INPUTS}
    whole = infer(showing_server.http, **given)
    assert whole.as_numpy("text_output").item().decode() == shown
    streamed = ask(showing_server.grpc, streaming=True, **given)
    assert "".join(answer.text for answer in streamed) == shown
    ids = whole.as_numpy("output_ids").reshape(-1).tolist()
    for server, expected in ((showing_server, shown), (exact_server, skipped)):
        assert postprocessed(server, [[ids]]).reshape(-1).tolist() == [expected.encode()]


def test_a_special_token_in_a_prompt_is_encoded_as_one_token(showing_server):
    answer = json.loads(
        curl(showing_server, "preprocessing/generate", {"QUERY": f"{END}def f():", "REQUEST_OUTPUT_LEN": 5})
    )
    assert answer["INPUT_ID"] == Tokenizer.from_dir(DEMO_MODEL).encode(f"{END}def f():")
    assert answer["INPUT_ID"][0] == 0


def test_postprocessing_answers_every_row_of_a_batch(exact_server):
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    texts = ["def f(x):\n", "    return x", "import os\n", "pass"]
    ids = [tokenizer.encode(text) for text in texts]
    longest = max(map(len, ids))
    batch = np.array([row + [0] * (longest - len(row)) for row in ids], np.int32).reshape(2, 2, longest)
    lengths = np.array([len(row) for row in ids], np.int32).reshape(2, 2)
    assert postprocessed(exact_server, batch, lengths).reshape(-1).tolist() == [
        text.encode() for text in texts
    ]


def postprocessed(server: TritonServer, ids: object, lengths: np.ndarray | None = None) -> np.ndarray:
    tensors = {"TOKENS_BATCH": np.array(ids, np.int32)}
    if lengths is not None:
        tensors["SEQUENCE_LENGTH"] = lengths
    inputs = []
    for name, array in tensors.items():
        inputs.append(http.InferInput(name, array.shape, "INT32"))
        inputs[-1].set_data_from_numpy(array)
    with http.InferenceServerClient(server.http.removeprefix("http://")) as client:
        return client.infer("postprocessing", inputs).as_numpy("OUTPUT")


def test_a_text_too_long_to_fit_is_refused_and_a_shorter_one_tokenized(exact_server):
    error = json.loads(
        curl(exact_server, "ensemble/generate", {"text_input": "x" * 100_000, "max_tokens": 1})
    )["error"]
    assert "text_input has 100000 bytes" in error and "bytes of text" in error
    long = "x = 1\n" * 3000
    error = json.loads(curl(exact_server, "ensemble/generate", {"text_input": long, "max_tokens": 1}))[
        "error"
    ]
    assert "text_input has" in error and "tokens; this server takes prompts of at most" in error


def test_a_text_of_many_megabytes_does_not_end_the_server(exact_server, tmp_path):
    """With small stacks, a long text in a body of HTTP generate overflows tritonserver's own stacks."""
    (tmp_path / "body").write_text(json.dumps({"text_input": "x" * 10_000_000, "max_tokens": 1}))
    url = f"{exact_server.http}/v2/models/ensemble/generate"
    answer = subprocess.run(
        ["curl", "-sS", url, "-d", f"@{tmp_path / 'body'}"], capture_output=True, text=True, timeout=60
    )
    assert "text_input has 10000000 bytes" in json.loads(answer.stdout)["error"], answer.stderr
    assert "text_output" in curl(
        exact_server, "ensemble/generate", {"text_input": "import os\n", "max_tokens": 1}
    )
