"""Token ids on the real server: every built tensor, and every refusal with its code, affecting no other."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.core.request.sampling_config import SamplingConfig
from inflight.testing.fake_model import expected_tokens

from .clients import Stream, ask, completion, infer, make_inputs, unary
from .conftest import FAKE_VOCABULARY

PROMPT = [5, 6, 7, 8, 9]


def alone(prompt: list[int], count: int, sampling: SamplingConfig | None = None) -> list[int]:
    return expected_tokens(prompt, count, FAKE_VOCABULARY, sampling, attend_to_all=False)


def test_one_response_has_the_prompt_and_the_expected_shapes(fake_server):
    (answer,) = ask(fake_server.grpc, input_ids=PROMPT, request_output_len=6)
    assert answer.final
    assert answer.outputs["output_ids"].shape == (1, 1, 11)
    assert answer.ids == PROMPT + alone(PROMPT, 6)
    assert answer.outputs["sequence_length"].tolist() == [[11]]
    assert answer.finish_reason == "LENGTH"


@pytest.mark.covers("exclude_input_in_output")
def test_the_prompt_can_be_excluded(fake_server):
    (answer,) = ask(fake_server.grpc, input_ids=PROMPT, request_output_len=6, exclude_input_in_output=True)
    assert answer.ids == alone(PROMPT, 6)
    assert answer.outputs["sequence_length"].tolist() == [[6]]


@pytest.mark.covers("streaming", "output_ids", "sequence_length")
def test_streamed_deltas_add_up_to_the_whole_output(fake_server):
    answers = ask(fake_server.grpc, input_ids=PROMPT, request_output_len=40, streaming=True)
    assert [token for answer in answers for token in answer.ids] == alone(PROMPT, 40)
    assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert [answer.finish_reason for answer in answers[:-1]] == ["NOT_FINISHED"] * (len(answers) - 1)
    assert answers[-1].finish_reason == "LENGTH"
    assert all(answer.outputs["sequence_length"].item() == len(answer.ids) for answer in answers)


@pytest.mark.covers("end_id")
def test_an_end_id_ends_the_output_and_is_not_returned(fake_server):
    tokens = alone(PROMPT, 20)
    end = next(token for token in tokens if tokens.index(token) > 3)
    (answer,) = ask(
        fake_server.grpc, input_ids=PROMPT, request_output_len=20, end_id=end, exclude_input_in_output=True
    )
    assert answer.ids == tokens[: tokens.index(end)]
    assert answer.finish_reason == "END_ID"


def test_sampling_parameters_and_seed_reach_the_engine(fake_server):
    for seed in (0, 7, 2**64 - 1):
        sampling = SamplingConfig(temperature=0.5, top_k=4, top_p=0.5, random_seed=seed)
        (answer,) = ask(
            fake_server.grpc,
            input_ids=PROMPT,
            request_output_len=5,
            temperature=0.5,
            runtime_top_k=4,
            runtime_top_p=0.5,
            random_seed=seed,
            exclude_input_in_output=True,
        )
        assert answer.ids == alone(PROMPT, 5, sampling)


def test_counts_are_returned_on_request(fake_server):
    (answer,) = ask(
        fake_server.grpc,
        input_ids=PROMPT,
        request_output_len=6,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert answer.outputs["num_input_tokens"].item() == 5
    assert answer.outputs["num_output_tokens"].item() == 6


def test_only_requested_outputs_are_returned(fake_server):
    with Stream(fake_server.grpc) as stream:
        stream.send("tensorrt_llm", outputs=["sequence_length"], input_ids=PROMPT, request_output_len=2)
        (answer,) = stream.until_final()
    assert list(answer.outputs) == ["sequence_length"]


def test_many_requests_on_one_stream_get_their_own_responses(fake_server):
    prompts = {str(number): [number + 1, number + 2, 3] for number in range(24)}
    received = {name: [] for name in prompts}
    with Stream(fake_server.grpc) as stream:
        for name, prompt in prompts.items():
            stream.send("tensorrt_llm", name, input_ids=prompt, request_output_len=30, streaming=True)
        for name, answer in stream.until_all_final():
            received[name] += answer.ids
    assert received == {name: alone(prompt, 30) for name, prompt in prompts.items()}


def test_http_infer_answers_once_on_the_model_that_is_not_decoupled(fake_server):
    result = infer(fake_server.http, input_ids=PROMPT, request_output_len=6)
    assert result.as_numpy("output_ids").reshape(-1).tolist() == PROMPT + alone(PROMPT, 6)


def test_unary_grpc_answers_on_the_model_that_is_not_decoupled(fake_server):
    result = unary(fake_server.grpc, input_ids=PROMPT, request_output_len=6)
    assert result.as_numpy("output_ids").reshape(-1).tolist() == PROMPT + alone(PROMPT, 6)


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        ({"request_output_len": 4}, "INVALID_ARGUMENT", ["input_ids"]),
        ({"input_ids": PROMPT}, "INVALID_ARGUMENT", ["request_output_len"]),
        ({"input_ids": PROMPT, "request_output_len": 0}, "INVALID_ARGUMENT", ["request_output_len", "0"]),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "temperature": 1e-40},
            "INVALID_ARGUMENT",
            ["temperature must be 0 (greedy), or in [1e-10, 1e+10]"],
        ),
        ({"input_ids": [5, 5000], "request_output_len": 4}, "INVALID_ARGUMENT", ["input_ids", "5000"]),
        (
            {"input_ids": [5] * 2048, "request_output_len": 4},
            "INVALID_ARGUMENT",
            ["input_ids", "2048", "2047"],
        ),
        (
            {"input_ids": [5] * 100, "request_output_len": 4000},
            "INVALID_ARGUMENT",
            ["request_output_len", "1948"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "temperature": -1},
            "INVALID_ARGUMENT",
            ["temperature"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "runtime_top_p": 2},
            "INVALID_ARGUMENT",
            ["runtime_top_p"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "end_id": 1000},
            "INVALID_ARGUMENT",
            ["end_id", "1000"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "beam_width": 65},
            "INVALID_ARGUMENT",
            ["beam_width", "64", "65"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "beam_width": 2, "num_return_sequences": 3},
            "INVALID_ARGUMENT",
            ["num_return_sequences", "3"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "repetition_penalty": 0},
            "INVALID_ARGUMENT",
            ["repetition_penalty", "0"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "embedding_bias": [1.0, 2.0]},
            "INVALID_ARGUMENT",
            ["embedding_bias", "[1, 1000]", "[1, 2]"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "draft_input_ids": [1], "beam_width": 2},
            "INVALID_ARGUMENT",
            ["draft_input_ids", "beam_width"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "lookahead_window_size": 3},
            "UNIMPLEMENTED",
            ["lookahead_window_size", "3"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "guided_decoding_guide_type": "xml"},
            "INVALID_ARGUMENT",
            ["guided_decoding_guide_type", "xml", "json_schema"],
        ),
        (
            {"input_ids": PROMPT, "request_output_len": 4, "stop": True},
            "INVALID_ARGUMENT",
            ["stop", "request_id"],
        ),
    ],
)
def test_a_refusal_names_the_tensor_and_affects_no_other_request(fake_server, tensors, code, words):
    """Triton's protocol has no code for a stream's error, so a unary request shows the code."""
    with Stream(fake_server.grpc) as other:
        other.send("tensorrt_llm", input_ids=PROMPT, request_output_len=25, streaming=True)
        (refused,) = ask(fake_server.grpc, **tensors)
        with pytest.raises(InferenceServerException) as caught:
            unary(fake_server.grpc, **tensors)
        untouched = [token for answer in other.until_final() for token in answer.ids]
    assert caught.value.status() == f"StatusCode.{code}", caught.value
    for word in words:
        assert word in str(refused.error)
        assert word in caught.value.message()
    assert untouched == alone(PROMPT, 25)


def test_neutral_values_of_unsupported_tensors_are_accepted(fake_server):
    """Upstream's defaults of built tensors have no effect either."""
    answer = completion(
        fake_server.grpc,
        input_ids=PROMPT,
        request_output_len=3,
        retention_decode_priority=35,
        priority=0.5,
        lookahead_window_size=0,
        guided_decoding_guide="",
        beam_width=1,
        no_repeat_ngram_size=1 << 30,
        runtime_top_p=0.0,
        runtime_top_p_reset_ids=-1,
        return_log_probs=False,
        bad_words=[""],
        stop_words=[""],
        embedding_bias_words=[""],
        embedding_bias_weights=[0.0],
    )
    assert answer.ids == alone(PROMPT, 3)


def test_an_id_in_flight_is_refused_and_may_be_reused_afterwards(fake_server):
    with Stream(fake_server.grpc) as first, Stream(fake_server.grpc) as second:
        first.send("tensorrt_llm", "same", input_ids=PROMPT, request_output_len=200, streaming=True)
        first.receive()
        second.send("tensorrt_llm", "same", input_ids=PROMPT, request_output_len=2)
        _, refused = second.receive()
        assert "requestId same is already in progress" in str(refused.error)
        assert len([token for answer in first.until_final() for token in answer.ids]) >= 190
        second.send("tensorrt_llm", "same", input_ids=PROMPT, request_output_len=2)
        _, answer = second.receive()
        assert answer.final and answer.error is None


def test_tritonserver_refuses_wrong_types_and_unknown_inputs(fake_server):
    client = grpc.InferenceServerClient(fake_server.grpc)
    wrong = grpc.InferInput("input_ids", [1, 2], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 2), np.float32))
    with pytest.raises(InferenceServerException, match="input_ids"):
        client.infer("tensorrt_llm_infer", [wrong, *make_inputs(grpc, request_output_len=2)])
    client.close()


def http_status(server, path: str, body: dict) -> int:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert json.load(caught.value)["error"]
    return caught.value.code


def test_http_returns_the_status_on_infer_and_400_on_generate(fake_server):
    bad, unsupported = {"request_output_len": 0}, {"request_output_len": 4, "lookahead_window_size": 2}
    for tensors, status in ((bad, 400), (unsupported, 501)):
        body = {"input_ids": PROMPT, **tensors}
        assert http_status(fake_server, "tensorrt_llm/generate", body) == 400
        shapes = {"input_ids": [1, len(PROMPT)]}
        inputs = [
            {
                "name": name,
                "datatype": "INT32",
                "shape": shapes.get(name, [1, 1]),
                "data": np.ravel(value).tolist(),
            }
            for name, value in body.items()
        ]
        assert http_status(fake_server, "tensorrt_llm_infer/infer", {"inputs": inputs}) == status
