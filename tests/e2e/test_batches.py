"""Several prompts of one Triton request, or sequences of one prompt, in separate responses or in one."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest

from inflight.core.request.sampling_config import SamplingConfig
from inflight.testing.fake_model import expected_tokens

from .clients import TIMEOUT_S, Answer, Stream, ask, infer, unary
from .conftest import FAKE_VOCABULARY

# Ragged: values beyond input_lengths do not matter.
PROMPTS = [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
LENGTHS = [4, 2, 3]


def alone(row: int, count: int, **sampling: object) -> list[int]:
    prompt = PROMPTS[row][: LENGTHS[row]]
    return expected_tokens(prompt, count, FAKE_VOCABULARY, SamplingConfig(**sampling), attend_to_all=False)


def column(values: list, dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)


def batch(**tensors: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array(PROMPTS, np.int32),
        "input_lengths": column(LENGTHS),
        "request_output_len": column([6, 3, 5]),
        "exclude_input_in_output": column([True] * 3, np.bool_),
    } | tensors


def by_prompt(answers: list[Answer]) -> dict[int, list[int]]:
    """Return all ids of each prompt, by its batch_index."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        found.setdefault(answer.outputs["batch_index"].item(), []).extend(answer.ids)
    return found


EXPECTED = {row: alone(row, count) for row, count in enumerate([6, 3, 5])}


@pytest.mark.covers("batch_index", "input_lengths")
@pytest.mark.parametrize("streaming", [True, False])
def test_every_prompt_of_a_batch_gets_its_own_answer(fake_server, streaming):
    answers = ask(fake_server.grpc, **batch(streaming=column([streaming] * 3, np.bool_)))
    assert by_prompt(answers) == EXPECTED
    assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
    finished = [answer for answer in answers if answer.finish_reason != "NOT_FINISHED"]
    assert sorted(answer.outputs["batch_index"].item() for answer in finished) == [0, 1, 2]


@pytest.mark.covers("batch_index", "pad_id")
def test_a_batch_has_one_response_from_a_model_that_is_not_decoupled(fake_server):
    tensors = batch(pad_id=column([7, -1, 7]), return_log_probs=column([False, True, False], np.bool_))
    for result in (infer(fake_server.http, **tensors), unary(fake_server.grpc, **tensors)):
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        assert lengths.tolist() == [[6], [3], [5]]
        assert ids.tolist() == [[EXPECTED[0]], [[*EXPECTED[1], -1, -1, -1]], [[*EXPECTED[2], 7]]]
        assert result.as_numpy("batch_index").tolist() == [[0], [1], [2]]
        assert result.as_numpy("finish_reason").tolist() == [[b"LENGTH"]] * 3
        log_probs = result.as_numpy("output_log_probs")
        assert log_probs.shape == (3, 1, 3) and not log_probs[[0, 2]].any() and log_probs[1].all()


@pytest.mark.covers("num_return_sequences")
def test_sequences_are_rows_of_the_response_if_not_decoupled(fake_server):
    result = infer(
        fake_server.http,
        input_ids=PROMPTS[0],
        request_output_len=6,
        num_return_sequences=3,
        runtime_top_k=10,
        random_seed=4,
        exclude_input_in_output=True,
    )
    rows = [
        expected_tokens(
            PROMPTS[0],
            6,
            FAKE_VOCABULARY,
            SamplingConfig(top_k=10, random_seed=4),
            attend_to_all=False,
            sequence_index=index,
        )
        for index in range(3)
    ]
    assert result.as_numpy("output_ids").tolist() == [rows]
    assert result.as_numpy("sequence_length").tolist() == [[6, 6, 6]]
    assert result.as_numpy("text_output").shape == (3,)


def test_responses_have_sequence_and_batch_indices(fake_server):
    answers = ask(
        fake_server.grpc,
        **batch(num_return_sequences=column([1, 2, 3]), runtime_top_k=column([10] * 3)),
    )
    tags = [
        (answer.outputs["batch_index"].item(), answer.outputs.get("sequence_index", np.zeros(1)).item())
        for answer in answers
    ]
    assert sorted(tags) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert [answer.final for answer in answers] == [False] * 5 + [True]


def test_an_invalid_row_refuses_the_whole_batch_of_a_request(fake_server):
    (refused,) = ask(fake_server.grpc, **batch(request_output_len=column([6, 0, 5])))
    assert "row 1 of the batch: request_output_len must be at least 1, got 0" in str(refused.error)


def test_a_batch_may_have_text_prompts(fake_server):
    texts = column([b"def f(x):", b"import os"], np.object_)
    answers = ask(
        fake_server.grpc,
        "ensemble",
        text_input=texts,
        max_tokens=column([5, 4]),
        end_id=column([-1, -1]),
        stream=column([True, True], np.bool_),
    )
    for row, text in enumerate([b"def f(x):", b"import os"]):
        (whole,) = ask(
            fake_server.grpc,
            "ensemble",
            text_input=text.decode(),
            max_tokens=[5, 4][row],
            end_id=-1,
            exclude_input_in_output=True,
        )
        deltas = [answer.text for answer in answers if answer.outputs["batch_index"].item() == row]
        assert "".join(deltas) == whole.text


def test_a_stop_ends_the_whole_batch(fake_server):
    with Stream(fake_server.grpc) as stream:
        long = batch(request_output_len=column([1500, 3, 1500]), streaming=column([True] * 3, np.bool_))
        stream.send("tensorrt_llm", "batch", **long)
        stream.receive()
        stream.send("tensorrt_llm", "batch", stop=True)
        reasons = []
        for _, answer in stream.until_all_final():
            if "finish_reason" in answer.outputs and answer.finish_reason != "NOT_FINISHED":
                reasons.append((answer.outputs["batch_index"].item(), answer.finish_reason))
    assert {(0, "CANCELLED"), (2, "CANCELLED")} <= set(reasons)


def test_a_cancel_frees_every_prompt_of_a_batch(fake_server):
    """The KV cache holds four such requests: the next ones run only after all rows are freed."""
    with Stream(fake_server.grpc) as stream:
        long = batch(request_output_len=column([1900] * 3), streaming=column([True] * 3, np.bool_))
        stream.send("tensorrt_llm", "batch", **long)
        for _ in range(4):
            stream.receive()
        stream.cancel()
    answers = ask(fake_server.grpc, **batch(request_output_len=column([1900] * 3)))
    assert {answer.finish_reason for answer in answers} == {"LENGTH"}


def test_a_batch_larger_than_max_batch_size_is_refused_by_triton(fake_server):
    size = 65
    (refused,) = ask(
        fake_server.grpc, input_ids=np.ones((size, 2), np.int32), request_output_len=column([2] * size)
    )
    assert "batch-size must be <= 64" in str(refused.error)


def generate(server, path: str, body: dict) -> str:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return response.read().decode()


def test_http_generate_accepts_a_batch_as_lists(fake_server):
    texts = ["def f(x):", "import os"]
    in_one = json.loads(
        generate(
            fake_server,
            "tensorrt_llm_infer/generate",
            {"text_input": texts, "request_output_len": [4, 4], "end_id": [-1, -1]},
        )
    )
    streamed = generate(
        fake_server,
        "ensemble/generate_stream",
        {"text_input": texts, "max_tokens": [4, 4], "end_id": [-1, -1]},
    )
    events = [json.loads(line[5:]) for line in streamed.splitlines() if line.startswith("data:")]
    assert in_one["batch_index"] == [0, 1] == sorted(event["batch_index"] for event in events)
    for event in events:
        assert event["text_output"] == in_one["text_output"][event["batch_index"]]
        assert event["text_output"].startswith(texts[event["batch_index"]])


def test_http_generate_accepts_a_word_list_as_one_flat_list(fake_server):
    tokens = alone(0, 6)
    body = {"input_ids": PROMPTS[0], "request_output_len": 6, "exclude_input_in_output": True}
    words = [tokens[2], tokens[3], 999, 2, 3, -1]
    answer = json.loads(
        generate(fake_server, "tensorrt_llm_infer/generate", {**body, "stop_words_list": words})
    )
    assert answer["output_ids"] == tokens[:4] and answer["finish_reason"] == "STOP_WORDS"
